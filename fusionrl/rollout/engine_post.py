"""`post` of a user's function: what the policy's engines answer is noted for the weight versions."""

from collections.abc import Mapping
from typing import Any

from fusionrl.engines.post_request import post as _post
from fusionrl.rollout.image_requests import check_expanded, function_request
from fusionrl.rollout.weight_versions import is_policy, note_answer


async def post(
    url: str, payload: Mapping[str, object], max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST `payload` as JSON and return the JSON that is answered; the run's own engines get their key by themselves.

    Broken connections and 5xx answers are tried again, with growing pauses of up to 8 s. Answers of the policy's
    engines are noted, so that the samples that a generate or rollout function makes get their weight versions. They
    get one placeholder for each image, whether `input_ids` have one or as many as it has tokens. Raises ValueError for
    a request to /generate without a token, of which an engine dies, or with other placeholders. Raises RuntimeError
    with the server's text for a 4xx answer, or the last failed try.
    """
    ids = payload.get("input_ids")
    num_tokens: int | None = None
    if url.endswith("/generate") and isinstance(ids, list) and (not ids or [] in ids):
        raise ValueError(f"post to {url}: input_ids is empty; give the tokens of the prompt")
    if url.endswith("/generate") and is_policy(url):
        payload, num_tokens = function_request(payload)
    answer = await _post(url, payload, max_retries, headers)
    if num_tokens is not None and answer["meta_info"]["finish_reason"]["type"] != "abort":
        check_expanded(answer["meta_info"]["prompt_tokens"], num_tokens, "the request")
    note_answer(url, answer, payload)
    return answer
