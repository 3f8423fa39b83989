"""The reward with --model: does the text give the answer, and if that is a number, its number?

    python dlc.py --model DIR --data gsm8k.jsonl   # this file, unless --reward names another

GSM8K's own rows are read as they are: an answer may be a solution that ends in `#### 42`."""

import re
import sys
from fractions import Fraction

sys.set_int_max_str_digits(0)  # a response may be one long number
NUMBER = r"(?:(?<![\w)])[-+])?(?:\d+/[1-9]\d*|\d*\.\d+|\d+)"


def plain(text):
    """Its numbers as Python writes them; a comma is dropped only before a group of three."""
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text.replace("−", "-"))
    return re.sub(r"\\?[$€£]|(?<=\d),(?=\d{3}(?!\d))", "", text).strip()


def reward(completion, row, stopped):
    """1 if the stripped text up to the stop is the answer; where that is a number, or a solution
    that ends in one after ####, if the completion's equals it: the number after the last #### or
    \\boxed{; else, of one sentence or one that is a bare number with its unit, the first (after
    "answer is", if it says so); else the last. Otherwise 0."""
    answer, text = row["answer"].rpartition("####")[2].strip(), plain(completion)
    if not re.fullmatch(NUMBER, plain(answer)):
        return float(completion.strip() == answer)
    marked, first = re.split(r"####|\\boxed\{", text), re.split(r"[.!?]\s|\n", text)[0]
    if len(marked) > 1:
        found = re.findall(NUMBER, marked[-1])[:1]
    elif first == text or re.fullmatch(rf"\W*?{NUMBER}\W*[^\W\d]*\W*", first):
        found = re.findall(NUMBER, first.split("answer is")[-1])[:1]
    else:
        found = re.findall(NUMBER, text)[-1:]
    return float(found != [] and Fraction(found[0]) == Fraction(plain(answer)))
