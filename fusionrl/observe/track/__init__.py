"""`fusionrl track`: the metrics of a run in W&B, TensorBoard, MLflow, SwanLab or trackio, from metrics.jsonl.

metrics.jsonl is the truth. A tracker is fed from it by a process of its own, so that no fault of a tracker's library or
network touches the run: afterwards, or live (--follow). What was sent is remembered, so that a repeated command sends
what is new, and a resumed run continues the same run of the tracker.

    adapters  one class for each tracker; for Prometheus, the newest values served over HTTP
    command   flags; lines to an open tracker, one after another; what has arrived at which tracker
"""
