"""`post` of a user's function: what the policy's engines answer is noted for the weight versions."""

from collections.abc import Mapping
from typing import Any

from fusionrl.engines.post_request import post as _post
from fusionrl.rollout.function_requests import FunctionRequest
from fusionrl.rollout.weight_versions import answers_of, note_answer


async def post(
    url: str, payload: Mapping[str, object], max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST `payload` as JSON and return the JSON that is answered; the run's own engines get their key by themselves.

    Broken connections and 5xx answers are tried again, with growing pauses of up to 8 s. Answers of the policy's
    engines are noted, so that the samples that a generate or rollout function makes get their weight versions. They
    get one placeholder for each image, whether `input_ids` have one or as many as it has tokens. None gets ids with a
    placeholder that the model has sampled: the answer has no token then, and the finish reason "length". With several
    adapters (--lora-adapters), a generate function's requests go to that of its sample; elsewhere, or to ask another
    adapter, put "lora_path": NAME into the payload ("base": the model without one). Raises
    ValueError for a request to /generate without a token, of which an engine dies, or with other placeholders. Raises
    RuntimeError with the server's text for a 4xx answer, or the last failed try.
    """
    ids = payload.get("input_ids")
    if url.endswith("/generate") and isinstance(ids, list) and (not ids or [] in ids):
        raise ValueError(f"post to {url}: input_ids is empty; give the tokens of the prompt")
    answers = answers_of(url) if url.endswith("/generate") else None
    if answers is not None and answers.adapter is not None:
        payload = {"lora_path": answers.adapter, **payload}
    request = None if answers is None else FunctionRequest.of(payload, answers.barred)
    if answers is None or request is None:
        answer = await _post(url, payload, max_retries, headers)
        note_answer(url, answer, payload)
        return answer
    answer = []
    if request.payload is not None:
        answer = await _post(url, request.payload, max_retries, headers)
        request.read(answer, answers)
        note_answer(url, answer, request.payload)
    return request.whole(answer)
