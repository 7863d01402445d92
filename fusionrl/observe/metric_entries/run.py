"""Entries of a step's times and of weight pushes."""

from __future__ import annotations

from fusionrl.observe.metric_entries.entry import Entry, Table

TIMES: Table = {
    "perf/step_time_s": Entry(
        "seconds",
        "The whole step: rollout, training, weight push. Evaluations and checkpoints are not in it. Of a step that a"
        " stop or an error ended: until then.",
        "runtime/step.py",
    ),
    "perf/time_generate_s": Entry(
        "seconds", "The rollout: generation, rewards, filters, and cutting it into shards.", "buffer/actor.py"
    ),
    "perf/time_wait_rollout_s": Entry(
        "seconds", "How long the step waited for its batch.", "buffer/stream_messages.py", "--pipeline that runs ahead"
    ),
    "perf/time_wait_batch_s": Entry(
        "seconds",
        "Of that, while fewer groups were ready than a batch takes.",
        "buffer/stream_metrics.py",
        "--pipeline that runs ahead",
    ),
    "perf/time_wait_deadline_s": Entry(
        "seconds",
        "Of that, while a batch was ready and stood back for groups that would be too old later.",
        "buffer/stream_metrics.py",
        "--pipeline that runs ahead",
    ),
    "perf/engines_idle": Entry(
        "share",
        "Share of the time in which engines had no sample, or were held up by a push: between two batches of a pipeline"
        " that runs ahead; else what perf/time_generate_s leaves of the step.",
        "runtime/step.py",
    ),
    "perf/trainers_idle": Entry(
        "share", "What training and the weight push leave of the step.", "runtime/step.py", "runs that train"
    ),
    "perf/time_drain_s": Entry(
        "seconds",
        "How long the push waited until nothing stood in its way: samples in flight, with --in-flight drain.",
        "runtime/step.py",
        "--pipeline that runs ahead",
    ),
    "perf/time_train_s": Entry(
        "seconds",
        "Training: all forward passes and optimizer steps, critic and reward model included.",
        "runtime/run_context.py",
    ),
    "perf/time_sync_s": Entry("seconds", "The weight push, without its verification.", "weights/push.py"),
    "perf/time_eval_s": Entry("seconds", "An evaluation of all sets.", "buffer/actor.py"),
    "perf/time_wait_eval_s": Entry(
        "seconds",
        "How long a push waited for the evaluation before, whose engines the next one needs.",
        "runtime/run_context.py",
        "--eval-num-gpus, where an evaluation follows",
    ),
    "perf/tokens_per_s": Entry(
        "tokens/s",
        "Response tokens of the rollout divided by perf/step_time_s; in mode sft trained tokens.",
        "runtime/step.py",
    ),
    "perf/update_weights_density": Entry(
        "share",
        "Share of the weights' elements that travelled; 1 for a full version.",
        "weights/disk_push.py",
        "--update-weight-transport disk",
    ),
    "perf/update_weights_wire_bytes": Entry(
        "bytes", "Size of the version's files.", "weights/disk_push.py", "--update-weight-transport disk"
    ),
}

_AHEAD = "--pipeline that runs ahead"
_STATE = "buffer/stream_metrics.py"

# When a batch is taken out of the stream, and of tokens since the batch before.
PIPELINE: Table = {
    "pipeline/in_flight": Entry("samples", "Under way in engines.", _STATE, _AHEAD),
    "pipeline/running": Entry("groups", "With samples that are under way.", _STATE, _AHEAD),
    "pipeline/ready": Entry("groups", "Ready to be trained, but for the batch.", _STATE, _AHEAD),
    "pipeline/parked": Entry("groups", "Begun, and waiting to go on.", _STATE, _AHEAD),
    "pipeline/admitted": Entry("groups", "Admitted and not dropped: trained, under way or ready.", _STATE, _AHEAD),
    "pipeline/credits": Entry(
        "groups", "That may be admitted and not yet be taken for training: the bound and the lead.", _STATE, _AHEAD
    ),
    "pipeline/credits_used": Entry(
        "groups",
        "Of these, that are under way, parked or ready; more than there are where a rollout function of yours took"
        " prompts beyond the bound.",
        _STATE,
        _AHEAD,
    ),
    "pipeline/tokens_generated": Entry(
        "tokens",
        "Response tokens of samples that ended since the batch before, tools' tokens included.",
        _STATE,
        _AHEAD,
    ),
    "pipeline/tokens_trained": Entry("tokens", "Of the batch, with a loss mask.", _STATE, _AHEAD),
    "pipeline/tokens_dropped": Entry(
        "tokens",
        "Of samples that ended and whose group was dropped: by a filter, at a deadline, as surplus.",
        _STATE,
        _AHEAD,
    ),
    "pipeline/tokens_prefilled_again": Entry(
        "tokens",
        "Prompt and response tokens whose KV cache was computed again because a push came while their sample was under"
        " way, of samples that ended; 0 with --in-flight drain and in_place.",
        _STATE,
        _AHEAD,
    ),
    "pipeline/length_trained_by_offered": Entry(
        "ratio",
        "Mean response length of the samples that were trained, divided by that of all that were generated, since"
        " the run was started or resumed. Below 1: long answers are trained less often.",
        _STATE,
        _AHEAD,
    ),
}


PUSHES: Table = {
    "sync/version": Entry(
        "version", "Version of the weights that the engines have after the push: equal to `step`.", "weights/push.py"
    ),
    "sync/prepare_s": Entry("seconds", "Preparation, while the engines generate.", "weights/push.py"),
    "sync/pause_s": Entry(
        "seconds",
        "Time from the first engine pausing until all have resumed.",
        "weights/push.py",
    ),
    "sync/transfer_s": Entry(
        "seconds",
        "From the first byte sent to the last one loaded, within the pause.",
        "weights/push.py",
        "not by disk",
    ),
    "sync/bytes": Entry("bytes", "Bytes of the weights, each counted once.", "weights/push.py"),
    "sync/buckets": Entry("buckets", "Parts in which they were sent; by disk, files.", "weights/push.py"),
    "sync/calls": Entry("calls", "Calls of engines.", "weights/push.py", "not by disk"),
    "sync/gb_per_s": Entry(
        "10^9 bytes/s", "What all engines together received in a second of the transfer.", "weights/push.py"
    ),
    "sync/full_hosts": Entry(
        "hosts",
        "Hosts that got the full version in place of a delta.",
        "weights/disk_push.py",
        "--update-weight-transport disk",
    ),
    "sync/engines_restarted": Entry(
        "engines", "Engines replaced since the run began.", "runtime/weight_sync.py", "--use-fault-tolerance"
    ),
    "sync/verify_logprob_diff": Entry(
        "nats",
        "Mean |log p(trainer) - log p(engine)| of a few tokens after the push, of the worst engine.",
        "weights/verify.py",
        "--verify-weights",
    ),
    "sync/verify_logprob_diff_max": Entry(
        "nats", "The largest of these differences.", "weights/verify.py", "--verify-weights"
    ),
    "sync/verify_tensors": Entry(
        "tensors",
        "Tensors of the engines whose checksums equal the trainers'.",
        "weights/verify.py",
        "--verify-weights",
    ),
}
