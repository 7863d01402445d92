"""The reward of DeepScaleR: a box after the end of the thinking."""

from fusionrl.rewards.grader import Grader
from fusionrl.rewards.math_utils import grade_answer_verl, read_truth


def get_deepscaler_rule_based_reward(response: str, label: object) -> float:
    r"""1 where the last `\boxed{…}` after `</think>` (or `###Response`) equals the label; 0 without such a marker."""
    if "</think>" in response:
        solution = response.rpartition("</think>")[2]
    elif "###Response" in response:
        solution = response.split("###Response")[1]
    else:
        return 0.0
    return float(grade_answer_verl(solution, label))


DEEPSCALER = Grader(get_deepscaler_rule_based_reward, read_truth, package="math_verify")
