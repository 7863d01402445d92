"""Batch arithmetic: prompts → samples → optimizer steps."""

from dataclasses import dataclass

from fusionrl.base.wording import counted, dividing


@dataclass(frozen=True)
class BatchPlan:
    """The division of one rollout into optimizer steps."""

    num_prompts: int
    num_samples_per_prompt: int
    num_steps: int  # optimizer steps of one rollout
    global_batch_size: int  # samples of one optimizer step
    dp_size: int

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.num_samples_per_prompt

    def describe(self) -> str:
        """The arithmetic in one line."""
        return (
            f"{counted(self.num_prompts, 'prompt')} x {counted(self.num_samples_per_prompt, 'sample')}"
            f" = {counted(self.num_samples, 'sample')} a rollout = {counted(self.num_steps, 'optimizer step')}"
            f" x {counted(self.global_batch_size, 'sample')}, over {counted(self.dp_size, 'rank')}"
        )


def plan_batches(
    *,
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    global_batch_size: int | None,
    num_steps_per_rollout: int | None,
    dp_size: int,
) -> BatchPlan:
    """Work out the missing one of --global-batch-size and --num-steps-per-rollout."""
    total = rollout_batch_size * n_samples_per_prompt
    product = (
        f"--rollout-batch-size {rollout_batch_size} x --n-samples-per-prompt {n_samples_per_prompt} = {total} samples"
    )
    num_samples_set = (global_batch_size or 0) * (num_steps_per_rollout or 0)
    if num_samples_set and num_samples_set != total:
        raise ValueError(
            f"{product}, but --global-batch-size {global_batch_size} x --num-steps-per-rollout "
            f"{num_steps_per_rollout} = {num_samples_set}; leave one of the two out"
        )
    if global_batch_size is None:
        steps = num_steps_per_rollout or 1
        if total % steps:
            fitting = dividing(total, steps, at_most=total // dp_size)
            raise ValueError(f"{product} do not divide into --num-steps-per-rollout {steps}; {fitting}")
        global_batch_size = total // steps
    if total % global_batch_size:
        fitting = dividing(total, global_batch_size, at_least=dp_size)
        raise ValueError(f"{product} do not divide into steps of --global-batch-size {global_batch_size}; {fitting}")
    if global_batch_size < dp_size:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is smaller than the {dp_size} data-parallel ranks: some would"
            " have nothing to train; raise it or use fewer ranks"
        )
    return BatchPlan(rollout_batch_size, n_samples_per_prompt, total // global_batch_size, global_batch_size, dp_size)
