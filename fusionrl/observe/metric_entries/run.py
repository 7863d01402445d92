"""Entries of a step's times and of weight pushes."""

from __future__ import annotations

from fusionrl.observe.metric_entries.entry import Entry, Table

TIMES: Table = {
    "perf/step_time_s": Entry(
        "seconds",
        "The whole step: rollout, training, weight push. Evaluations and checkpoints are not in it.",
        "driver/step.py",
    ),
    "perf/time_generate_s": Entry(
        "seconds", "The rollout: generation, rewards, filters, and cutting it into shards.", "buffer/actor.py"
    ),
    "perf/time_wait_rollout_s": Entry(
        "seconds", "How long the step waited for its batch.", "buffer/stream_messages.py", "--pipeline that runs ahead"
    ),
    "perf/time_drain_s": Entry(
        "seconds",
        "How long the push waited until nothing stood in its way: samples in flight, with --in-flight drain.",
        "driver/step.py",
        "--pipeline that runs ahead",
    ),
    "perf/time_train_s": Entry(
        "seconds",
        "Training: all forward passes and optimizer steps, critic and reward model included.",
        "driver/context.py",
    ),
    "perf/time_sync_s": Entry("seconds", "The weight push, without its verification.", "sync/push.py"),
    "perf/time_eval_s": Entry("seconds", "An evaluation of all sets.", "buffer/actor.py"),
    "perf/time_wait_eval_s": Entry(
        "seconds",
        "How long a push waited for the evaluation before, whose engines the next one needs.",
        "driver/context.py",
        "--eval-num-gpus, where an evaluation follows",
    ),
    "perf/tokens_per_s": Entry(
        "tokens/s",
        "Response tokens of the rollout divided by perf/step_time_s; in mode sft trained tokens.",
        "driver/step.py",
    ),
    "perf/update_weights_density": Entry(
        "share",
        "Share of the weights' elements that travelled; 1 for a full version.",
        "sync/disk_push.py",
        "--update-weight-transport disk",
    ),
    "perf/update_weights_wire_bytes": Entry(
        "bytes", "Size of the version's files.", "sync/disk_push.py", "--update-weight-transport disk"
    ),
}

# When a batch is taken out of the stream.
PIPELINE: Table = {
    "pipeline/in_flight": Entry("samples", "Under way in engines.", "buffer/stream.py", "--pipeline that runs ahead"),
    "pipeline/running": Entry(
        "groups", "With samples that are under way.", "buffer/stream.py", "--pipeline that runs ahead"
    ),
    "pipeline/ready": Entry(
        "groups", "Ready to be trained, but for the batch.", "buffer/stream.py", "--pipeline that runs ahead"
    ),
    "pipeline/admitted": Entry(
        "groups",
        "Admitted and not dropped: trained, under way or ready.",
        "buffer/stream.py",
        "--pipeline that runs ahead",
    ),
}


PUSHES: Table = {
    "sync/version": Entry(
        "version", "Version of the weights that the engines have after the push: equal to `step`.", "sync/push.py"
    ),
    "sync/prepare_s": Entry("seconds", "Preparation, while the engines generate.", "sync/push.py"),
    "sync/pause_s": Entry("seconds", "How long the engines were paused.", "sync/push.py"),
    "sync/transfer_s": Entry(
        "seconds",
        "From the first byte sent to the last one loaded, within the pause.",
        "sync/push.py",
        "not by disk",
    ),
    "sync/bytes": Entry("bytes", "Bytes of the weights, each counted once.", "sync/push.py"),
    "sync/buckets": Entry("buckets", "Parts in which they were sent; by disk, files.", "sync/push.py"),
    "sync/calls": Entry("calls", "Calls of engines.", "sync/push.py", "not by disk"),
    "sync/gb_per_s": Entry(
        "10^9 bytes/s", "What all engines together received in a second of the transfer.", "sync/push.py"
    ),
    "sync/full_hosts": Entry(
        "hosts",
        "Hosts that got the full version in place of a delta.",
        "sync/disk_push.py",
        "--update-weight-transport disk",
    ),
    "sync/engines_restarted": Entry(
        "engines", "Engines replaced since the run began.", "cluster/weight_sync.py", "--use-fault-tolerance"
    ),
    "sync/verify_logprob_diff": Entry(
        "nats",
        "Mean |log p(trainer) - log p(engine)| of a few tokens after the push, of the worst engine.",
        "sync/verify.py",
        "--verify-weights",
    ),
    "sync/verify_logprob_diff_max": Entry(
        "nats", "The largest of these differences.", "sync/verify.py", "--verify-weights"
    ),
    "sync/verify_tensors": Entry(
        "tensors",
        "Tensors of the engines whose checksums equal the trainers'.",
        "sync/verify.py",
        "--verify-weights",
    ),
}
