"""How many bytes each feature takes in a table's files, from their footers."""

from __future__ import annotations

from collections import Counter

from penstock.warehouse.table import Table


def column_bytes(table: Table, *, files: int = 8) -> dict[int, float]:
    """Return about what each feature takes, by id: measured in some files, spread over the table."""
    logged = table.snapshot().files
    step = max(1, len(logged) // files)
    sizes: Counter[int] = Counter()
    for file in logged[::step]:
        metadata = table.open_file(table.folder / file.path).metadata
        for group in range(metadata.num_row_groups):
            found = metadata.row_group(group)
            for leaf in range(metadata.num_columns):
                column = found.column(leaf)
                name = column.path_in_schema.partition(".")[0]
                if name[0] == "f" and name[1:].isdigit():
                    sizes[int(name[1:])] += column.total_compressed_size
    return {feature: size * step for feature, size in sizes.items()}
