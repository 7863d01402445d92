"""Loading of user functions: from `package.module.function` or from `path/to/file.py:function`.

A hook is loaded when the command starts, before Ray does, and again by name in the process that calls it. `hook_files`
finds modules next to a hook's file; `user_code` reports what a hook raises.
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fusionrl.base import cpu_wing
from fusionrl.config.hook_files import import_file, install_stand_ins, register_folder
from fusionrl.config.user_code import HookError as HookError
from fusionrl.config.user_code import last_user_line, user_code

# Every process that loads a user's function does so by this module: in each of them the name `slime` is known.
install_stand_ins()
cpu_wing.install_stand_ins()  # a hook may import sglang's parsers, which import triton, on a machine without CUDA

# Per flag: the call as fusionrl makes it, as people read it. What stands after `*`, or has a default, is a keyword.
SIGNATURES: dict[str, str] = {
    "rollout_function_path": "generate_rollout(args, rollout_id, data_source, evaluation=False)",
    "eval_function_path": "generate_rollout(args, rollout_id, data_source, evaluation=False)",
    "custom_generate_function_path": "async generate(args, sample, sampling_params)",
    "rollout_sample_hook_path": "hook(args, sample, *, rollout_id, evaluation)",
    "tools_path": "tools(args, sample)",
    "agent_path": "[async] agent(args, sample, base_url, api_key)",
    "custom_rm_path": "[async] rm(args, sample, **kw)",
    "dynamic_sampling_filter_path": "filter(args, samples, **kw)",
    "rollout_sample_filter_path": "filter(args, groups)",
    "rollout_all_samples_process_path": "process(args, groups, get_samples)",
    "custom_rollout_log_function_path": "log(rollout_id, args, samples, metrics, time_s)",
    "custom_eval_rollout_log_function_path": "log(rollout_id, args, data, metrics)",
    "custom_reward_post_process_path": "post_process(args, samples)",
    "custom_convert_samples_to_train_data_path": "convert(args, samples)",
    "custom_advantage_function_path": "advantages(args, rollout_data)",
    "rollout_data_postprocess_path": "postprocess(args, rollout_id, rollout_data)",
    "custom_loss_function_path": "loss(args, batch, logits, sum_of_sample_mean)",
    "custom_policy_loss_path": "policy_loss(log_probs, old_log_probs, advantages, mask, sequences, options)",
    "custom_tis_function_path": "tis(*, args, pg_loss, train_log_probs, rollout_log_probs,"
    " loss_masks, total_lengths, response_lengths)",
    "custom_pg_loss_reducer_function_path": "reducer(total_lengths, response_lengths, loss_masks,"
    " calculate_per_token_loss)",
    "custom_model_provider_path": "provider(*, pre_process, post_process, vp_stage=None)",
    "custom_spec_path": "spec(args, config, vp_stage)",
    "custom_megatron_init_path": "init(args)",
    "custom_megatron_before_log_prob_hook_path": "hook(args, model, store_prefix)",
    "custom_megatron_before_train_step_hook_path": "hook(args, rollout_id, step_id, model, optimizer,"
    " opt_param_scheduler)",
    "custom_update_weight_post_write_path": "post_write(args, version_dir, rollout_engines)",
    "buffer_filter_path": "buffer_filter(args, rollout_id, buffer, num_samples)",
    "data_source_path": "class DataSource(args)",
}

# Functions that may be called as miles calls them: with one `input`, and a class is made an object first.
_MAY_TAKE_INPUT = frozenset({"rollout_function_path", "eval_function_path", "custom_generate_function_path"})
# Functions whose result fusionrl awaits: it must be awaitable, or may be. Results of other hooks are not awaited.
_MUST_BE_ASYNC = frozenset({"custom_generate_function_path"})
_MAY_BE_ASYNC = frozenset({"rollout_sample_hook_path", "custom_rm_path", "agent_path"})

# Names of the first parameters that reward functions of other frameworks have: bound by position, one of these would
# get `args` or a sample, and compare it with texts in silence.
_FOREIGN_REWARD_NAMES = {
    *("response", "responses", "completion", "completions", "prompt", "prompts", "prediction", "predict_str"),
    *("solution_str", "solution", "model_output", "model_response", "output", "text", "data_source", "query"),
    *("label", "labels", "ground_truth", "gold", "answer", "answers", "reference", "target", "expected"),
}

# Keyword arguments that a function gets only if its signature names them.
OPTIONAL: dict[str, tuple[str, ...]] = {"custom_model_provider_path": ("config", "args", "usual")}


def call_hook(field: str, path: str, *args: object, **kwargs: object) -> Any:
    """Call the function `path` of the flag of `field`. HookError: whatever the function raised."""
    function = load_function(path)
    with user_code(f"{flag_of(field)} {path}", path, *args):
        return function(*args, **kwargs)


async def awaited_hook(field: str, path: str, *args: object, **kwargs: object) -> Any:
    """As `call_hook`; what the function returns is awaited if it can be."""
    function = load_function(path)
    with user_code(f"{flag_of(field)} {path}", path, *args):
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


def flag_of(field: str) -> str:
    """`rollout_batch_size` → `--rollout-batch-size`."""
    return "--" + field.replace("_", "-")


def load_function(path: str) -> Callable[..., Any]:
    """The function (or class) that `path` names. ValueError: it cannot be imported, or is not callable."""
    function = load_object(path)
    if not callable(function):
        raise ValueError(f"{path!r} is not callable")
    return function


OLD_API, NEW_API = "fusionrl.slime_api.", "fusionrl.compat.slime.api."


@functools.cache
def load_object(path: str) -> Any:
    """As `load_function`, for any object of a module: a list of tools, say."""
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if module_name.startswith(OLD_API):  # in config files and run folders from before the move
        module_name = NEW_API + module_name[len(OLD_API) :]
    if not module_name or not name:
        raise ValueError(f"{path!r} is neither package.module.function nor path/to/file.py:function")
    if ":" not in path and name == "py":
        raise ValueError(_without_a_function(path))
    if ":" in path and not Path(module_name).is_file():
        raise ValueError(f"{path!r}: file {module_name!r} does not exist")
    try:
        module = import_file(Path(module_name)) if ":" in path else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything; all of it is the user's to mend
        hint = ""
        if isinstance(error, ImportError) and (error.name or "").startswith("megatron.training"):
            hint = "; megatron.training is Megatron-LM's and no part of megatron-core: import from megatron.core"
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("fusionrl."):
            hint = "; modules of fusionrl may move: import its public names from fusionrl.plugin_api"
        local_file = f"{module_name.replace('.', '/')}.py"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            is_local = ":" not in path and Path(local_file).is_file()
            hint = f"; the current folder is not searched for modules: write {local_file}:{name}" if is_local else ""
        line = last_user_line(error, path)
        at = f" at {line}" if line else ""
        raise ValueError(f"{path!r} cannot be imported: {type(error).__name__}: {error}{at}{hint}") from error
    try:
        value = getattr(module, name, None)
    except ImportError as error:  # a slime name that fusionrl lacks
        raise ValueError(f"{path!r}: {error}") from error
    if value is None:
        there = _functions_in(module_name) if ":" in path else []
        hint = f"; it has {', '.join(there)}" if there else ""
        raise ValueError(f"{path!r}: the module {module_name!r} has no {name!r}{hint}")
    return value


def _without_a_function(path: str) -> str:
    if not Path(path).is_file():
        return f"{path!r}: this file does not exist; name a function as path/to/file.py:function"
    names = _functions_in(path)
    several = f" (it has {', '.join(names)})" if len(names) > 1 else ""
    return f"{path!r} is a file; name the function, too: {path}:{names[0] if names else 'function'}{several}"


def _functions_in(file: str) -> list[str]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def hook_paths(args: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(field, path) of each function that the flags `args` name."""
    for field in SIGNATURES:
        paths = args.get(field) or ()
        for path in [paths] if isinstance(paths, str) else paths if isinstance(paths, list | tuple) else ():
            yield field, path


def hook_values(args: Mapping[str, object]) -> dict[str, object]:
    """Return the flags of users' functions among `args`, those that are set."""
    return {field: value for field in SIGNATURES if (value := args.get(field))}


def register_hooks(args: Mapping[str, object]) -> None:
    """Let this process unpickle what the functions of the flags `args` made in others: objects of their own classes."""
    for _, path in hook_paths(args):
        if ":" in path:
            register_folder(Path(path.rpartition(":")[0]))


def check_hook(field: str, path: str) -> str | None:
    """Return the error of the hook `path` of the flag of `field`, or None if it loads and takes its call."""
    flag, readable = flag_of(field), SIGNATURES[field]
    (call,) = ast.parse(f"def f({readable.partition('(')[2]}: ...").body
    assert isinstance(call, ast.FunctionDef)
    names = [argument.arg for argument in call.args.args]
    num_positional = len(names) - len(call.args.defaults)
    keywords = names[num_positional:] + [argument.arg for argument in call.args.kwonlyargs]
    try:
        function = load_function(path)
    except ValueError as error:
        return f"{flag}: {error}; expected {readable}"
    try:
        signature = inspect.signature(function)
        if takes_input(field, function):
            is_made_first = inspect.isclass(function) and field in _MUST_BE_ASYNC
            num_positional, keywords = 0 if is_made_first else 1, []
        taken = [name for name in OPTIONAL.get(field, ()) if name in signature.parameters]
        signature.bind(*[None] * num_positional, **dict.fromkeys([*keywords, *taken]))
    except TypeError as error:
        return f"{flag} {path}: its signature {inspect.signature(function)} does not fit ({error}); expected {readable}"
    except ValueError:  # no signature to be had (a builtin): the call itself will tell
        return None
    problem = _foreign_problem(field, signature) or _async_problem(field, function)
    return None if problem is None else f"{flag} {path}: {problem}; expected {readable}"


def takes_input(field: str, function: Callable[..., Any]) -> bool:
    """Return whether a function is called with one `input`, as miles' are: a class, or a generate function.

    `fusionrl.rollout.miles_inputs` makes these calls.
    """
    if inspect.isclass(function):
        return field in _MAY_TAKE_INPUT
    return field in _MUST_BE_ASYNC and next(iter(inspect.signature(function).parameters), None) == "input"


def _foreign_problem(field: str, signature: inspect.Signature) -> str | None:
    if field != "custom_rm_path":
        return None
    foreign = [name for name in list(signature.parameters)[:2] if name in _FOREIGN_REWARD_NAMES]
    if not foreign:
        return None
    bound = f"{' and '.join(foreign)} would be bound by position to args and sample"
    cure = "write rm(args, sample, **kw), and read sample.prompt, sample.response and sample.label"
    return f"its signature {signature} comes from another framework: {bound}; {cure}"


def _async_problem(field: str, function: Callable[..., Any]) -> str | None:
    """Return what is wrong with a function that is async where fusionrl does not await it, or the other way round.

    A plain `def`, also as a method, in a partial or as an object's `__call__`, that promises no awaitable is refused
    where fusionrl awaits; what a lambda or a decorator's function returns, the call will tell.
    """
    if field in _MAY_BE_ASYNC:
        return None
    while isinstance(function, functools.partial):
        function = function.func
    called = _called(field, function)
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in (function, called)):
        is_right = field in _MUST_BE_ASYNC
        return None if is_right else "it is async, but its result is not awaited; write def in place of async def"
    is_plain = inspect.isfunction(called) and "<" not in called.__qualname__  # <lambda>, <locals>
    if field not in _MUST_BE_ASYNC or not is_plain or any(hasattr(each, "__wrapped__") for each in (function, called)):
        return None
    if any(name in str(called.__annotations__.get("return")) for name in ("Awaitable", "Coroutine", "Future", "Task")):
        return None
    return "it is not async; write async def (or say with -> Awaitable[Sample] that a plain function returns one)"


def _called(field: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return what a call runs: the function itself, that of a method, or the `__call__` of an object."""
    if inspect.isclass(function):  # a generate function's is made an object first
        return function.__call__ if field in _MUST_BE_ASYNC else function
    called = function if inspect.isroutine(function) else type(function).__call__
    return called.__func__ if inspect.ismethod(called) else called
