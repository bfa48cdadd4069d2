"""`penstock cache`: what is kept, listed, checked, pinned and removed."""

from __future__ import annotations

from penstock.cli.main import main
from penstock.testing.conformance import read_all
from tests.caching.kit import entry_files, in_splits, store_at


def test_what_is_kept_is_listed_verified_pinned_and_removed(tmp_path, capsys):
    read_all(in_splits(tmp_path), seed=1)
    store_at(tmp_path)

    def cache(*arguments):
        code = main(["cache", *arguments, "--location", str(tmp_path)])
        return code, capsys.readouterr().out

    code, out = cache("ls")
    assert code == 0 and "6 entries" in out and "from_generator(split_texts) → " in out and "map(numbered)" in out
    prefix = out.splitlines()[1].split()[0]
    assert cache("verify") == (0, "6 entries read, 0 damaged\n")
    assert cache("pin", prefix)[1].startswith("6 entries are pinned")
    assert cache("pin", "nothing")[0] == 1
    assert "not measured yet" in cache("why")[1]
    path = entry_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-100])
    code, out = cache("verify")
    assert code == 1 and "6 entries read, 1 damaged" in out
    path = entry_files(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    code, out = cache("verify")
    assert code == 1 and "5 entries read, 1 damaged" in out
    assert cache("rm", prefix)[1].startswith("4 entries removed")
    assert not entry_files(tmp_path)
