"""`--rm-type remote_rm`: a server scores the samples."""

from argparse import Namespace

from fusionrl.data.sample import Sample
from fusionrl.engines.post_request import post

PATH = f"{__name__}.remote_rm"
MAX_TRIES = 10


async def remote_rm(args: Namespace, sample: Sample, **kwargs: object) -> object:
    """Return the answer of --rm-url to `{"prompt", "response", "label"}`: a number or a JSON object (see --reward-key).

    Broken connections and 5xx answers are tried again with growing pauses, within --reward-timeout-s. Raises
    RuntimeError for a 4xx answer, or the last failed try.
    """
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(args.rm_url, payload, max_retries=MAX_TRIES)
