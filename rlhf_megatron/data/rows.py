"""Rows of JSONL and parquet files as plain Python objects, each with its file and row number."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class DataError(ValueError):
    """A data file or a row of it is not usable; the message names the file, the row and the remedy."""

    explains_itself = True


class SourceRow(NamedTuple):
    """One row: `row`, or `problem` in words when it could not be read."""

    where: str
    row: dict[str, Any] | None
    problem: str | None = None


def read_rows(paths: str | Path | Iterable[str | Path]) -> Iterator[SourceRow]:
    """All rows of the files, in order. Row numbers count from 1 (in JSONL they are line numbers; blank lines are
    skipped).

    Raises:
        DataError: a file is missing, has another ending than .jsonl or .parquet, or is not readable as a whole.
    """
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        if not path.is_file():
            raise DataError(f"data file {path} does not exist")
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path)
        elif path.suffix == ".parquet":
            yield from _read_parquet(path)
        else:
            raise DataError(f"data file {path}: the ending must be .jsonl or .parquet")


def normalize(value: Any) -> Any:
    """Plain JSON-like Python: arrays to lists, None-valued keys of dicts dropped, dates to ISO text, decimals to
    numbers.

    Columnar files unify nested structs over all rows, so that a dict comes back with keys of other rows set to None.
    The same rule is applied to JSONL, so that one data set reads the same from both.

    Raises:
        ValueError: a value (bytes, say) has no JSON counterpart.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): normalize(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [normalize(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return normalize(value.tolist())
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise ValueError(f"holds {type(value).__name__}, which is not supported; store text or numbers")


def _normal_row(where: str, row: Any) -> SourceRow:
    if not isinstance(row, dict):
        return SourceRow(where, None, f"is {type(row).__name__}, not an object with columns")
    plain = {}
    for key, value in row.items():  # on the top level a None stays: an empty cell, not a key of another row
        try:
            plain[str(key)] = normalize(value)
        except ValueError as error:
            return SourceRow(where, None, f"column {key!r} {error}")
        except RecursionError:
            return SourceRow(where, None, f"column {key!r} is nested too deeply")
    return SourceRow(where, plain)


def _read_jsonl(path: Path) -> Iterator[SourceRow]:
    with open(path, "rb") as handle:  # bytes: lines end at \n only, never at U+2028 or \r inside a text
        for number, line in enumerate(handle, start=1):
            where = f"{path}, row {number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except RecursionError:
                yield SourceRow(where, None, "is nested too deeply")
            except UnicodeDecodeError as error:
                yield SourceRow(where, None, f"is not UTF-8 (byte {error.start})")
            except ValueError as error:
                yield SourceRow(where, None, f"is not JSON ({error})")
            else:
                yield _normal_row(where, row)


def _read_parquet(path: Path) -> Iterator[SourceRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in _python_rows(batch):
                    number += 1
                    where = f"{path}, row {number}"
                    yield SourceRow(where, None, row) if isinstance(row, str) else _normal_row(where, row)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data file {path} is not readable as parquet: {error}") from error


def _python_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Rows of a record batch; a row that cannot be converted (text that is not UTF-8) is its problem in words."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except ValueError as error:
                yield f"cannot be converted ({error})"
