"""Checks a pickle's opcodes for what would end or hang the process before the unpickler could refuse it."""

from __future__ import annotations

import pickletools

from loaderkit.errors import FormatError

_MAX_TUPLES = 100_000  # safe however they are nested; hashing 300,000 in one another ends the process
_MAX_NESTED = 1000
# Forty tuples, each of which holds the one before twice, are 10^12 objects for a hash.
_MAX_SHARED = 12  # up to this number of tuples from the memo, any sharing is safe
_MAX_UNFOLDED = 10**6  # objects in all tuples from the memo, and 16 more a byte of the pickle

_LINE, _TWO_LINES, _INDEX_LINE, _PUT, _PUT4, _MEMOIZE, _GET, _GET4, _TUPLE, _BUILD, _OLD, _STOP = range(-1, -13, -1)
_SIZED1, _SIZED4, _SIZED8 = range(-13, -16, -1)
_WIDTHS = {_SIZED1: 1, _SIZED4: 4, _SIZED8: 8}  # bytes of the number in front of the argument, its length
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_SPECIAL = {
    "GLOBAL": _TWO_LINES,
    "INST": _TWO_LINES,
    "BUILD": _BUILD,
    "STOP": _STOP,
    "BINPUT": _PUT,
    "LONG_BINPUT": _PUT4,
    "MEMOIZE": _MEMOIZE,
    "BINGET": _GET,
    "LONG_BINGET": _GET4,
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), _TUPLE),
    "PUT": _INDEX_LINE,
    "GET": _INDEX_LINE,
    "DUP": _OLD,
    "POP": _OLD,
    "POP_MARK": _OLD,
}


def _argument_of(code: int) -> int:
    """The number of bytes of an opcode's argument; below 0: one of the kinds above."""
    opcode = _OPCODES.get(code)
    if opcode is None:  # the unpickler refuses it
        return _STOP
    if opcode.name in _SPECIAL:
        return _SPECIAL[opcode.name]
    if opcode.arg is None:
        return 0
    sized = {
        pickletools.UP_TO_NEWLINE: _LINE,
        pickletools.TAKEN_FROM_ARGUMENT1: _SIZED1,
        pickletools.TAKEN_FROM_ARGUMENT4: _SIZED4,
        pickletools.TAKEN_FROM_ARGUMENT4U: _SIZED4,
        pickletools.TAKEN_FROM_ARGUMENT8U: _SIZED8,
    }
    return sized.get(opcode.arg.n, opcode.arg.n)


_ARGUMENTS = tuple(map(_argument_of, range(256)))


def check_opcodes(data: bytes) -> None:  # noqa: C901, PLR0912, PLR0915 - a call for every opcode would take twice as long
    """Raise FormatError for a memo index so high that its table takes all memory (nine bytes are enough), for tuples that
    cannot be hashed, and for a pickle that is cut short.

    It takes 0.15 to 0.3 us an opcode, a tenth of the time of restoring many small tensors.
    """
    at, end, num_tuples, num_shared, num_memoized = 0, len(data), 0, 0, 0
    tuples: set[int] = set()  # memo indexes that may hold a tuple
    left_at = -1  # behind the last opcode that may have left a tuple; REDUCE of a stand-in leaves none, or a flat one
    has_indexes = is_unusual = False
    while at < end:
        kind = _ARGUMENTS[data[at]]
        at += 1
        if kind >= 0:
            at += kind
        elif kind == _MEMOIZE:
            if left_at == at - 1:
                tuples.add(num_memoized)
                left_at = at
            num_memoized += 1
        elif kind == _GET:
            num_shared += at < end and data[at] in tuples
            left_at = at = at + 1
        elif kind == _TUPLE:
            num_tuples += 1
            left_at = at
        elif kind == _GET4:
            num_shared += int.from_bytes(data[at : at + 4], "little") in tuples
            left_at = at = at + 4
        elif kind in (_PUT, _PUT4):
            width = 1 if kind == _PUT else 4
            index = int.from_bytes(data[at : at + width], "little")
            _check_index(index, end)
            if left_at == at - 1:
                tuples.add(index)
                left_at = at + width
            at, has_indexes = at + width, True
        elif kind == _BUILD:
            left_at = at
        elif kind in _WIDTHS:
            width = _WIDTHS[kind]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif kind == _STOP:
            break
        elif kind == _OLD:
            is_unusual = True
        else:
            line_end = data.find(b"\n", at)
            if kind == _INDEX_LINE:
                is_unusual = True
                digits = data[at:line_end]
                # Others are refused later.
                _check_index(int(digits) if digits.isdigit() and len(digits) < 20 else 0, end)
            elif kind == _TWO_LINES and line_end >= 0:
                line_end = data.find(b"\n", line_end + 1)
            at = line_end + 1 or end  # without an end of line, the pickle is cut short
    else:
        raise FormatError("it ends in the middle of its pickle: it was cut short, or is damaged")
    if num_tuples > _MAX_TUPLES or num_shared > _MAX_SHARED or is_unusual or (has_indexes and num_memoized):
        _check_tuples(data)


def _check_index(index: int, num_bytes: int) -> None:
    if index > num_bytes:  # every object takes a byte at least
        raise FormatError(
            f"it stores an object at a place that {num_bytes} bytes cannot need: it is damaged, or a bomb"
        )


def _check_tuples(data: bytes) -> None:
    """Raise FormatError for tuples that cannot be hashed. A hash recurses into nested tuples without a limit, which may end the
    process, and hashes a shared tuple again at each reference, which may not end."""
    stack: list[tuple[int, int]] = []  # upper bounds of each object: the nesting of tuples in it, and its objects
    marks: list[int] = []
    stored: dict[int, tuple[int, int]] = {}
    num_unfolded, max_unfolded = 0, _MAX_UNFOLDED + 16 * len(data)
    for opcode, argument, _ in pickletools.genops(data):
        before, after = opcode.stack_before, opcode.stack_after
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif opcode.name == "MEMOIZE" or "PUT" in opcode.name:
            stored[len(stored) if argument is None else int(argument)] = stack[-1]
        elif "GET" in opcode.name or opcode.name == "DUP":
            stack.append(stack[-1] if opcode.name == "DUP" else stored[int(argument or 0)])
            num_unfolded += stack[-1][1]
        elif opcode.name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        else:
            takes_mark = pickletools.markobject in before
            num_fixed = before.index(pickletools.markobject) if takes_mark else len(before)
            cut = (marks.pop() if takes_mark else len(stack)) - num_fixed
            depth = max((depth for depth, _ in stack[cut:]), default=0) + opcode.name.startswith("TUPLE")
            size = 1 + sum(size for _, size in stack[cut:])
            if depth > _MAX_NESTED:
                raise FormatError("it is nested too deeply to be a checkpoint")
            if num_unfolded > max_unfolded:
                raise FormatError(
                    f"it repeats tuples in tuples that hold more than {max_unfolded} objects in all: it is a bomb"
                )
            del stack[cut:]
            is_hashed = bool(after) and after[0] in (pickletools.anyobject, pickletools.pytuple)
            stack += [(depth, size) if is_hashed else (0, 1)] * len(after)
