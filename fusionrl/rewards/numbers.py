r"""One grammar of written numbers, for answers and labels alike, and the reward that compares them.

A number has an optional sign (ASCII, U+2212 or a dash), an optional currency sign on either side of it, digits with
thousands separators (a comma, or LaTeX's `{,}`, before every three digits), a decimal point, and an exponent (`e-3`,
`×10^{-3}`, `\times 10^{-3}`, `×10⁻³`); or it is a plain fraction, `3/4` or `\frac{3}{4}`. A percent sign or a currency
sign behind it is a unit. A comma that separates no thousands separates two numbers. Values are exact at any length.
"""

import re
from collections import deque
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from fusionrl.rewards.registry import Reward

Number = Decimal | Fraction  # a Fraction where the text has a slash

_SIGN = "[-+−–﹣－＋]"
_NUMBER = re.compile(  # the minus of 7-5 is not a sign
    rf"(?:(?<![\w)\]}}.+−–-])(?P<sign>{_SIGN}))?(?:\\?\$|[€£¥₹])?(?:(?<=[$€£¥₹])(?P<inner>{_SIGN}))?"
    r"(?P<digits>\d+(?:(?:,|\{,\})\d+)*(?:\.\d+)?|(?<![\w.])\.\d+)"
    rf"(?:[eE](?P<exponent>{_SIGN}?\d+)"
    rf"|\s?(?:×|\\times|\\cdot|[*·])\s?10(?:(?:\^|\*\*)\{{?(?P<power>{_SIGN}?\d+)\}}?|(?P<raised>[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))"
    r"|/(?P<denominator>\d+)(?!\d|/|[.,]\d))?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_UNIT = re.compile(r"\s?(?:\\?[%$]|[€£¥₹])")
_ASCII = str.maketrans("−–﹣－＋⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "----+0123456789-+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MAX_FRACTION_CHARACTERS = 4000  # Python reads integers of up to 4,300 digits
_MAX_EXPONENT = 10_000  # a fraction is not compared with numbers beyond it


def last_number_in(text: str) -> Number | None:
    """Return the last number of a text; None if it has none."""
    last: deque[re.Match[str]] = deque(_NUMBER.finditer(_LATEX_FRACTION.sub(r"\1/\2", text)), maxlen=1)
    return _value(last[0], is_alone=False) if last else None


def read_number(text: str) -> Number | None:
    """Return the number that the whole text is, a unit `%` or a currency sign aside; None if it is anything else."""
    text = _LATEX_FRACTION.sub(r"\1/\2", text.strip())
    match = _NUMBER.match(text)
    if match is None or (match.end() < len(text) and not _UNIT.fullmatch(text, match.end())):
        return None
    return _value(match, is_alone=True)


def is_equal_number(first: Number, second: Number) -> bool:
    if type(first) is type(second):
        return first == second
    fraction, decimal = (first, second) if isinstance(first, Fraction) else (second, first)
    assert isinstance(decimal, Decimal)
    if decimal and abs(decimal.adjusted()) > _MAX_EXPONENT:
        return False
    return fraction == Fraction(decimal)


def hundredth(number: Number) -> Number:
    """Return a number divided by 100, exactly."""
    if isinstance(number, Fraction):
        return number / 100
    sign, digits, exponent = number.as_tuple()
    return Decimal((sign, digits, int(exponent) - 2))


def join_thousands(text: str) -> str:
    """Return a number of digits in thousands (`12,345`) without its separators; any other text as it is."""
    return text.replace(",", "") if _THOUSANDS.fullmatch(text.lstrip("-+")) else text


def _value(match: re.Match[str], *, is_alone: bool) -> Number | None:
    sign = match["sign"] or match["inner"] or ""
    if match["sign"] and match["inner"]:
        return None
    digits, denominator = match["digits"].replace("{,}", ","), match["denominator"]
    if "," in digits:
        if _THOUSANDS.fullmatch(digits):
            digits = digits.replace(",", "")
        elif is_alone:
            return None
        else:  # the last of several numbers
            sign, digits = "", digits.rpartition(",")[2]
    if denominator and match.start() and match.string[match.start() - 1] == "/":  # a date
        sign, digits, denominator = "", denominator, None
    sign = sign.translate(_ASCII)
    if denominator:
        if "." in digits or len(digits) + len(denominator) > _MAX_FRACTION_CHARACTERS or not int(denominator):
            return None
        return Fraction(int(sign + digits), int(denominator))
    exponent = match["exponent"] or match["power"] or match["raised"] or "0"
    try:
        number = Decimal(f"{sign}{digits}e{exponent.translate(_ASCII)}")
    except InvalidOperation:  # the exponent is beyond any use
        return None
    return number if number.is_finite() else None


def last_number(response: str, label: object) -> float:
    """1 where the last number of the response equals the label, by this grammar for both."""
    truth, answer = read_number_label(label), last_number_in(response)
    return float(answer is not None and is_equal_number(answer, truth))


def read_number_label(label: object) -> Number:
    """Return a label as a number. Raises ValueError if it is none."""
    if label is None:
        raise ValueError("--rm-type last_number: there is no label (null, or --label-key names no column of the row)")
    number = read_number(str(label))
    if number is None:
        raise ValueError(f"--rm-type last_number: the label {label!r:.80} is not a number")
    return number


LAST_NUMBER = Reward(last_number, read_number_label, label="answer")
