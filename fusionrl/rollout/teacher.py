"""On-policy distillation: a teacher's log-prob of each token that the policy's samples hold (--use-opd)."""

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from typing import Self

import numpy as np

from fusionrl.data.sample import Sample, response_mask
from fusionrl.engines.answers import input_log_probs
from fusionrl.engines.client import GenerateClient

MAX_IN_FLIGHT = 64  # requests at each engine, which puts them together into batches
# Nothing is generated. The temperature says nothing either: log-probs of what is read are those of temperature 1.
_READ_ONLY = {"max_new_tokens": 0, "temperature": 1.0}


class Teacher:
    """The teacher's engines. Belongs to one event loop; a context manager."""

    def __init__(self, args: Namespace) -> None:
        """Read `teacher_urls`, `api_key` and `vocab_size` of a hook's `args`."""
        self._clients = [
            GenerateClient(url, args.api_key, max_connections=MAX_IN_FLIGHT, vocab_size=args.vocab_size)
            for url in args.teacher_urls
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        """Score `samples` while other things are done; `finish` waits for it."""
        self._tasks.append(asyncio.create_task(self.add_log_probs(samples)))

    async def finish(self) -> None:
        """Wait for everything that `begin` started; raises what `add_log_probs` raises."""
        await asyncio.gather(*self._tasks)

    async def add_log_probs(self, samples: Sequence[Sample]) -> None:
        """Fill in `teacher_log_probs`, [response_length] float32, of the samples that lack it and train something.

        The tokens of tools and environments are scored with the others; a first token without a prompt gets 0. Raises
        RuntimeError, which names the sample, if the teacher refused it, or gave no number.
        """
        unscored = [s for s in samples if s.teacher_log_probs is None and response_mask(s).any()]
        await asyncio.gather(*(self._add_log_probs(sample) for sample in unscored))

    async def _add_log_probs(self, sample: Sample) -> None:
        sample.validate()
        # A group's prompt is read once: its samples go to one engine, which keeps what it has computed.
        client = self._clients[(sample.group_index or 0) % len(self._clients)]
        tokens = np.asarray(sample.array("tokens")).tolist()
        payload = {
            "input_ids": tokens,
            "sampling_params": _READ_ONLY,
            "return_logprob": True,
            "logprob_start_len": max(sample.prompt_length - 1, 0),
        }
        # The first token of a sample without a prompt has no log-prob. The ids in the answer prove nothing: SGLang
        # writes 0 for the vocabulary's last one.
        count = sample.response_length - (sample.prompt_length == 0)
        try:
            answer = await client.generate(payload)
            log_probs = input_log_probs(answer.meta_info, count)
        except RuntimeError as error:
            raise RuntimeError(f"--opd-teacher-load: the teacher at sample {sample.index}: {error}") from error
        log_probs = np.concatenate([np.zeros(sample.response_length - count, np.float32), log_probs])
        sample.teacher_log_probs = log_probs

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))


async def score_samples(args: Namespace, samples: Sequence[Sample]) -> None:
    """`Teacher.add_log_probs` of samples, by clients that are opened for it on this event loop."""
    async with Teacher(args) as teacher:
        await teacher.add_log_probs(samples)
