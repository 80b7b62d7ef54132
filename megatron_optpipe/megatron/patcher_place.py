"""Finding a place in a source file by its structure, putting lines there, taking them out again.

All on bytes, so that line endings, encodings and a missing last newline stay as they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from megatron_optpipe.megatron.patcher_set import Insert, PatchError

#: Ends every inserted line, and no other.
MARKER = b"  # optpipe patch"

# Lines as Python counts them, ends included. (bytes.splitlines would do, str.splitlines would not:
# it also breaks at form feeds, which Megatron's sources may hold.)
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def marked_lines(source: bytes) -> list[int]:
    """Numbers (from 0) of the lines that bear our marker."""
    return [i for i, line in enumerate(_lines(source)) if line.rstrip(b"\r\n").endswith(MARKER)]


def is_inserted(source: bytes, insert: Insert) -> bool:
    """Whether the lines of ``insert`` stand in their function, unchanged and together."""
    return _block(source, insert) is not None


def inserted(source: bytes, insert: Insert) -> bytes:
    """``source`` with the lines of ``insert`` in their place.

    Raises:
        PatchError: the place is not what it is in that version of Megatron; names it.
    """
    lines = _lines(source)
    anchor = _anchor(source, insert)
    at = anchor.lineno - 1
    ending = b"\r\n" if lines[at].endswith(b"\r\n") else b"\n"
    indent = lines[at][: anchor.col_offset]
    if indent.strip():
        raise PatchError(
            f"{insert.file}: line {at + 1} has a statement before the return; put it on a line "
            "of its own, or restore the file"
        )
    new = [indent + line.encode("ascii") + MARKER + ending for line in insert.lines]
    return b"".join(lines[:at] + new + lines[at:])


def without_inserts(source: bytes, inserts: Sequence[Insert], file: str) -> bytes:
    """``source`` without the lines of those ``inserts`` that stand in it.

    Raises:
        PatchError: a line bears our marker and is not as we wrote it, so it is the user's now.
    """
    lines = _lines(source)
    blocks = [block for insert in inserts if (block := _block(source, insert)) is not None]
    ours = {i for block in blocks for i in block}
    strange = [i for i in marked_lines(source) if i not in ours]
    if strange:
        raise PatchError(
            f"{file}: line {strange[0] + 1} was inserted by optpipe and changed or moved since; "
            "delete the lines marked '# optpipe patch' by hand, or restore the file"
        )
    return b"".join(line for i, line in enumerate(lines) if i not in ours)


def _lines(source: bytes) -> list[bytes]:
    return _LINE.findall(source)


def _tree(source: bytes, file: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise PatchError(f"{file}: not valid Python ({error}); restore or repair it") from None


def _functions(source: bytes, insert: Insert) -> list[_Function]:
    return [
        node
        for node in _tree(source, insert.file).body
        if isinstance(node, _Function) and node.name == insert.function
    ]


def _anchor(source: bytes, insert: Insert) -> ast.Return:
    """The one ``return NAME`` of the function's own body."""
    functions = _functions(source, insert)
    where, remedy = f"{insert.file}: {insert.function}()", "changed file? restore it"
    if len(functions) != 1:
        raise PatchError(f"{where} is defined {len(functions)} times, expected once; {remedy}")
    function = functions[0]
    takes = {a.arg for a in (*function.args.posonlyargs, *function.args.args)}
    missing = [name for name in insert.parameters if name not in takes]
    if missing:
        raise PatchError(f"{where} takes no parameter '{missing[0]}'; {remedy}")
    returns = [
        node
        for node in function.body
        if isinstance(node, ast.Return)
        and isinstance(node.value, ast.Name)
        and node.value.id == insert.before_return_of
    ]
    if len(returns) != 1:
        raise PatchError(
            f"{where} has {len(returns)} 'return {insert.before_return_of}' in its body, "
            f"expected one; {remedy}"
        )
    return returns[0]


def _block(source: bytes, insert: Insert) -> range | None:
    """Where the lines of ``insert`` stand in its function, or None."""
    lines = _lines(source)
    wanted = [line.encode("ascii") + MARKER for line in insert.lines]
    for function in _functions(source, insert):
        for start in range(function.lineno - 1, (function.end_lineno or 0) - len(wanted) + 1):
            if [line.strip() for line in lines[start : start + len(wanted)]] == [
                line.strip() for line in wanted
            ]:
                return range(start, start + len(wanted))
    return None
