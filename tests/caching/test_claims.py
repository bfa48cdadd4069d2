"""Who makes an entry: one of several, who is waited for as long as he gets on with it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import penstock as ps
from penstock.caching import claims as claims_module
from penstock.caching.claims import Claims
from tests.caching.kit import store_at, write_texts
from tests.waiting import wait_until

NAME = "prefix/entry"
HOLD = """
import sys
from pathlib import Path
from penstock.caching.claims import Claims
claim = Claims(Path(sys.argv[1])).take("prefix/entry")
print(claim is not None, flush=True)
sys.stdin.read()
"""


def test_one_has_a_claim_until_it_is_released(tmp_path):
    one, other = Claims(tmp_path), Claims(tmp_path)
    held = one.take(NAME)
    assert held is not None and not other.is_being_made(NAME), "nobody waits for his own process"
    assert other.take(NAME) is None and one.take(NAME) is None
    held.release()
    again = other.take(NAME)
    assert again is not None
    held.release()
    assert one.take(NAME) is None, "released twice, it takes nothing from its successor"


def test_a_claim_ends_with_its_process(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "True\n"
    claims = Claims(tmp_path)
    assert claims.take(NAME) is None and claims.is_being_made(NAME)
    holder.kill()
    holder.communicate()
    assert not claims.is_being_made(NAME)
    assert claims.take(NAME) is not None


def test_who_does_not_get_on_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_module, "FIRST_S", -1.0)
    claims = Claims(tmp_path)
    held = claims.take(NAME)
    monkeypatch.setattr(claims_module, "_this_process", lambda: b"another")
    assert held is not None and not claims.is_being_made(NAME) and claims.take(NAME) is None
    held.made_some(1.0)
    assert claims.is_being_made(NAME)


def test_a_loop_inside_a_loop_over_the_same_data_does_not_wait_for_itself(tmp_path):
    paths = write_texts(tmp_path / "data", files=3, lines=20)
    dataset = ps.read_text(paths).map(str.upper).autocache(tmp_path / "kept", always=True)
    began = time.perf_counter()
    outer = iter(dataset)
    next(outer)
    assert len(list(dataset)) == 60 and len(list(outer)) == 59
    assert time.perf_counter() - began < claims_module.FIRST_S


def test_many_threads_have_a_claim_one_after_the_other(tmp_path):
    inside, most = 0, 0
    lock = threading.Lock()

    def work():
        nonlocal inside, most
        claims, done = Claims(tmp_path), 0
        while done < 20:
            held = claims.take(NAME)
            if held is None:
                continue
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
            held.release()
            done += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_waiting_in_vain_takes_a_share_of_the_time(tmp_path):
    claims = Claims(tmp_path)
    assert claims.may_wait
    claims.waited_in_vain(claims_module.VAIN_S + 1.0)
    assert not claims.may_wait


def test_a_run_that_is_closed_in_the_middle_of_a_split_leaves_no_claim(tmp_path):
    paths = write_texts(tmp_path / "data", files=2, lines=50)
    dataset = ps.read_text(paths).map(str.upper).autocache(tmp_path / "kept", always=True)
    with dataset.iterator(threads=1) as iterator:
        next(iterator)
    store_at(tmp_path / "kept")
    wait_until(lambda: not list((tmp_path / "kept").rglob("*.claim")), "claims are released")
    assert len(list(dataset)) == 100
    store_at(tmp_path / "kept")
    assert not list((tmp_path / "kept").rglob("*.claim"))
