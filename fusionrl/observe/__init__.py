"""Everything that a run leaves behind and shows to a person.

    metrics, glossary                   metrics.jsonl, and what each metric is (the table in glossary.md)
    rollouts, run_dir, engine_list      the other files of a run's folder
    progress, panel, logs, advice       the terminal during a run: display, log, warnings about rollouts
    show, view/, curves                 `fusionrl show`; the run page of `fusionrl view`; curves.png
    spans, timeline/                    what each process did, and when; `fusionrl timeline`
    track/                              `fusionrl track`: one class for each tracker, and Prometheus
    stalls/, hardware                   stacks of a stalled run; GPUs and host memory

Imports neither ray, megatron nor sglang; torch, tensorboard and matplotlib only inside the functions that need them.
"""
