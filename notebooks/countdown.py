"""A reward of one's own: Countdown, an expression of the given numbers, each once, for a target.

    python dlc.py --model DIR --data FILE.jsonl --reward notebooks/countdown.py

A line of FILE.jsonl: {"prompt": "Using 3, 5 and 9, each once, make 42. Expression:",
                       "answer": "9*5-3", "numbers": [3, 5, 9], "target": 42}
Keys beside prompt and answer are kept, and reach `reward` in its `row`."""

import ast
import operator
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv}


def value(node):
    """The value of a parsed expression: whole numbers and + - * / alone, never `eval`."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError("another thing than a number or + - * /")


def reward(completion, row, stopped):
    """1 if the first line, up to an equals sign, is such an expression; 0.1 if only its value is
    wrong; else 0. completion: text up to the stop; row: the data's line; stopped: whether it was
    reached."""
    expression = completion.strip().split("\n")[0].split("=")[0].strip()
    try:
        tree = ast.parse(expression, mode="eval")
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        right = value(tree.body) == row["target"]
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    if sorted(used) != sorted(row["numbers"]):
        return 0.0
    return 1.0 if right else 0.1
