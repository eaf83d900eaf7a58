"""Counts the layers of a model that have experts, from --moe-layer-freq or --expert-interval."""

from __future__ import annotations

import ast
from math import ceil

from holmes_ext.errors import HolmesError

#: A list of layers is not made longer than this, so that a short text such as "[1]*9999*9999" cannot fill
#: the memory. No model has as many layers.
MAX_PATTERN_LENGTH = 100_000


def count_expert_layers(frequency: str, layers: int, is_deepspeed: bool) -> int:
    """Return the number of layers that have experts.

    Args:
        frequency: Value of --moe-layer-freq or --expert-interval. A number N gives experts to every N-th
            layer. An expression such as "([0]+[1]*23)*2" has a 1 for each layer with experts.
        layers: Number of all layers.
        is_deepspeed: Whether the framework is Megatron-DeepSpeed, whose flag is --expert-interval.

    Raises:
        HolmesError: The value is neither, or its list has not one entry for each layer. Megatron-LM
            refuses such values, too.
    """
    flag = "--expert-interval" if is_deepspeed else "--moe-layer-freq"
    if frequency.isdecimal() and int(frequency):
        interval = int(frequency)
        # Megatron-LM gives experts to the first of N layers, Megatron-DeepSpeed to the last.
        count = layers // interval if is_deepspeed else ceil(layers / interval)
        return max(1, count)
    try:
        pattern = _evaluate(ast.parse(frequency, mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        pattern = 0  # no list
    if not isinstance(pattern, list):
        raise HolmesError(
            f"{flag} {frequency:.40}: neither a number above 0 nor a list with a 1 for each layer "
            'with experts; write it like "[0]*3+[1]*58"'
        )
    if len(pattern) != layers:
        raise HolmesError(
            f"{flag} {frequency:.40}: the list has {len(pattern)} entries for {layers} layers; "
            "make the numbers agree"
        )
    return sum(map(bool, pattern))


def _evaluate(node: ast.expr) -> int | list[int]:
    """Return the value of a layer pattern, such as "([0]+[1]*2)*2", without running it as Python code.

    The value is a list with a number for each layer: here [0, 1, 1, 0, 1, 1], where 1 is a layer with
    experts. The expression may have numbers, lists of numbers, + and *, with Python's meaning.

    Args:
        node: Syntax tree of the expression, or of a part of it.

    Raises:
        ValueError: The expression has other parts, or a number or list beyond MAX_PATTERN_LENGTH.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        if node.value <= MAX_PATTERN_LENGTH:
            return int(node.value)
    elif isinstance(node, ast.List):
        return [_number(_evaluate(element)) for element in node.elts]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(_evaluate(node.left), _evaluate(node.right))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product(_evaluate(node.left), _evaluate(node.right))
    raise ValueError(ast.dump(node))


def _number(value: int | list[int]) -> int:
    """Return `value` if it is a number; raise ValueError if it is a list."""
    if isinstance(value, list):
        raise ValueError("a list inside a list")
    return value


def _sum(left: int | list[int], right: int | list[int]) -> int | list[int]:
    """Return the sum of two numbers, or the concatenation of two lists.

    Raises:
        ValueError: One is a number and the other a list, or the list would be too long.
    """
    if isinstance(left, list) and isinstance(right, list):
        if len(left) + len(right) > MAX_PATTERN_LENGTH:
            raise ValueError("the list is too long")
        return left + right
    return _number(left) + _number(right)  # _number() raises ValueError for a list beside a number


def _product(left: int | list[int], right: int | list[int]) -> int | list[int]:
    """Return the product of two numbers, or of a list and the number of its repetitions.

    Raises:
        ValueError: Both are lists, or the result would be too large.
    """
    if isinstance(right, list):
        left, right = right, left  # a list, if there is one, is at the left
    times = _number(right)
    length = len(left) if isinstance(left, list) else left
    if length * times > MAX_PATTERN_LENGTH:
        raise ValueError("the list is too long")
    return left * times
