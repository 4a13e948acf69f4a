"""Parquet files with a column of encoded images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualmcmc.data.formats.folder import Keep, NoImages
from dualmcmc.data.source import EncodedImage, FileSource, ImageSource, InMemory
from dualmcmc.utils.errors import UserError, first_line, sanitize
from dualmcmc.utils.extras import require


def open_parquet(path: Path, shards: list[Path], keep: Keep | None = None) -> ImageSource:
    """The images of one or several parquet files: a binary column, or a struct with a field `bytes`."""
    pyarrow, parquet = (require(module, "data", "reading parquet") for module in ("pyarrow", "pyarrow.parquet"))

    def find_column(file: Any, shard: Path) -> tuple[str, bool]:
        """The column's name, and whether it is a struct."""
        found = []
        for field in file.schema_arrow:
            kind = field.type.value_type if pyarrow.types.is_dictionary(field.type) else field.type
            nested = pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            inner = kind.field("bytes").type if nested else kind
            if pyarrow.types.is_binary(inner) or pyarrow.types.is_large_binary(inner):
                found.append((field.name, nested))
        if not found:
            names = sanitize(", ".join(file.schema_arrow.names), 300)
            raise UserError(f"'{shard}' has no column of encoded images, only: {names}.")
        return sorted(found, key=lambda item: item[0] not in ("image", "img"))[0]

    def listing() -> Iterator[EncodedImage]:
        for shard in shards:
            try:
                with parquet.ParquetFile(shard) as file:
                    column, nested = find_column(file, shard)
                    # One at a time: a dictionary can make many large values of a small file.
                    for row, batch in enumerate(file.iter_batches(batch_size=1, columns=[column])):
                        value = batch.column(0)[0].as_py()
                        content = value.get("bytes") if nested and value else value
                        name = f"{shard}:{row}"
                        if keep is None or keep(name):
                            yield name, InMemory(content or b"")
            except UserError:
                raise
            except Exception as error:  # a damaged file can fail in many ways
                raise UserError(f"cannot read '{shard}': {first_line(error)}.") from None

    try:
        count = sum(parquet.read_metadata(shard).num_rows for shard in shards)
    except Exception as error:  # a damaged file can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None
    if count == 0:
        raise NoImages(f"'{path}' contains no images.")
    return FileSource(str(path), listing, count if keep is None else None)
