"""Everything that a run leaves behind and shows to a person.

    metrics, glossary           metrics.jsonl, and what each metric is
    rollouts, run_dir           the other files of a run's folder
    progress, logs, advice      the terminal during a run: display, log, warnings about rollouts
    show, view/, curves         `fusionrl show`; the run page of `fusionrl view`; curves.png
    spans, timeline/            what each process did, and when; `fusionrl timeline`
    track, trackers             `fusionrl track`: one class for each tracker, and Prometheus
    stalls, hardware            stacks of a stalled run; GPUs and host memory
    formats                     values as JSON, and as text that is safe for a terminal

Imports neither ray, megatron nor sglang; torch, tensorboard and matplotlib only inside the functions that need them.
"""
