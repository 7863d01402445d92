"""SGLang's router (`sglang_router`) as a child process."""

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from fusionrl.engines.answers import as_list, as_object
from fusionrl.engines.http import NO_KEY, EndpointError, call
from fusionrl.engines.process import ChildProcess, PortReservation, base_url, start_on_free_ports
from fusionrl.engines.spec import package_environment, to_flags

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 7 * 24 * 3600
"""The router's default of half an hour ends long generations and requests that wait out a paused engine."""

_DEFAULTS: dict[str, object] = {
    # It requires no key; the run itself reads it on this machine.
    "prometheus_host": "127.0.0.1",
    "policy": "cache_aware",
    "health_check_interval_secs": 5,
    "health_check_timeout_secs": 20,
    "request_timeout_secs": _REQUEST_TIMEOUT_S,
    "worker_startup_timeout_secs": 300,
    "worker_startup_check_interval": 1,
    # A burst of broken connections would shut the only engine out; a dead one is found by the health check, and by
    # the run itself, which watches the process.
    "disable_circuit_breaker": True,
    "log_level": "warn",
}
_LOOK_S, _HANGS_S = 5.0, 30.0  # between two questions whether it answers, and until it counts as hung


class Router:
    """Starts, fills and ends one router."""

    def __init__(
        self,
        host: str,
        log_dir: str,
        *,
        api_key: str | None = None,
        router_args: Mapping[str, object] | None = None,
        start_timeout_s: float = 60.0,
        name: str = "router",
        on_death: Callable[[RuntimeError], None] | None = None,
    ) -> None:
        """`router_args` are fields of sglang_router's RouterArgs; they win over the defaults here.

        `host` is the address to bind, by which clients reach it. With an `api_key` the router asks its clients for it.
        `name` is that of its log. A router that dies or hangs is started again, at its address and with its engines,
        unless `on_death` raises what it gets; default: it does.
        """
        args = dict(router_args or {})
        self._fixed_port = _port(args.pop("port", None))
        self._fixed_prometheus_port = _port(args.pop("prometheus_port", None))
        self._args = {**_DEFAULTS, **args}
        self._host, self._prometheus_host = host, str(self._args["prometheus_host"])
        self._api_key = api_key
        self._log_path = Path(log_dir, f"{name}.log")
        self._start_timeout_s = start_timeout_s
        self._process: ChildProcess | None = None
        self._metrics_url = ""
        self._workers: dict[str, str | None] = {}  # url of an engine → its key
        self._on_death, self._next_look = on_death, 0.0
        self._not_back = set[str]()  # engines that a new router did not take back yet
        self._num_refusals_logged = self._num_retries = self._num_retries_before = 0  # before: its last start
        self.url = ""

    def start(self) -> str:
        """Start the router, wait until it answers, and return its base URL; ValueError if a fixed port is in use."""
        for flag, host, port in (
            ("--router-port", self._host, self._fixed_port),
            ("--router-prometheus-port", self._prometheus_host, self._fixed_prometheus_port),
        ):
            if port is not None:
                PortReservation(host, port, flag=flag).release()
        self._process = start_on_free_ports([self._host, self._prometheus_host], self._spawn, self._wait_ready)
        return self.url

    def _spawn(self, ports: list[int]) -> ChildProcess:
        port = self._fixed_port or ports[0]
        self.url = base_url(self._host, port)
        # Its default is one fixed port, which a second router on the machine could not have.
        prometheus_port = self._fixed_prometheus_port or ports[1]
        self._metrics_url = base_url(self._prometheus_host, prometheus_port) + "/metrics"
        own = {"host": self._host, "port": port, "prometheus_port": prometheus_port}
        flags = to_flags({**self._args, **own})
        command = [sys.executable, "-m", "fusionrl.engines.launch_router", *flags]
        return ChildProcess(command, self._log_path, env=package_environment("router"), secret=self._api_key)

    def _wait_ready(self, process: ChildProcess) -> None:
        def answers() -> bool:
            try:
                call("GET", self.url + "/liveness", timeout_s=10.0)
            except RuntimeError:
                return False
            return True

        process.wait_until(answers, self._start_timeout_s, f"start of the router at {self.url}")

    def add_worker(self, url: str, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        """Register an engine with the key `api_key`, and wait `timeout_s` at most until the router finds it healthy."""
        self._living("add a worker")
        self._register(url, api_key)
        self._workers[url] = api_key
        self._not_back.discard(url)
        deadline = time.monotonic() + timeout_s
        while not any(worker["url"] == url and worker["is_healthy"] for worker in self.workers()):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the router at {self.url} does not find {url} healthy after {timeout_s:.0f} s; its log is"
                    f" {self._log_path}"
                )
            time.sleep(0.05)

    def _register(self, url: str, api_key: str | None) -> None:
        payload: dict[str, object] = {"url": url}
        if api_key is not None:
            payload["api_key"] = api_key
        if self._args.get("pd_disaggregation"):
            payload |= _half_of_pair(url, api_key)
        self._call("POST", "/workers", payload)

    def remove_worker(self, url: str, timeout_s: float = 30.0) -> None:
        """Take an engine out and wait until the router no longer lists it, if it does."""
        self._workers.pop(url, None)
        deadline = time.monotonic() + timeout_s
        while listed := [worker for worker in self.workers() if worker["url"] == url]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the router at {self.url} still lists {url} after {timeout_s:.0f} s")
            try:
                self._call("DELETE", "/workers/" + quote(str(listed[0]["id"]), safe=""))
            except EndpointError as error:
                if error.status != 404:  # it went between the look and the call
                    raise
            time.sleep(0.05)

    def workers(self) -> list[dict[str, object]]:
        """The router's records of its engines: id, url, is_healthy and more."""
        records = as_list(as_object(self._call("GET", "/workers"), "/workers")["workers"], "workers of /workers")
        return [as_object(record, "a worker of /workers") for record in records]

    def num_retries(self) -> int:
        """Requests that the router has sent to an engine again by itself, since its first start."""
        self._num_retries = self._num_retries_before + self._count("smg_worker_retries_total")
        return self._num_retries

    def num_refused(self) -> int:
        """Requests that the router has refused since its start, as they carried no key or a wrong one."""
        return self._count("smg_http_responses_total", 'status_code="401"')

    def warn_of_refusals(self) -> None:
        """Log how many requests were refused since the last call, and the cure: their senders see a bare 401."""
        try:
            count = self.num_refused()
        except RuntimeError as error:  # the supervision reports a dead router
            logger.debug("the router does not report how many requests it refused: %s", error)
            return
        if count > self._num_refusals_logged:
            num_new = count - self._num_refusals_logged
            logger.warning("the router at %s answered 401 to %d requests: %s", self.url, num_new, NO_KEY)
        self._num_refusals_logged = count

    def _count(self, name: str, label: str = "") -> int:
        """Add up a counter of the router's own, over the labels that have `label` among them."""
        text = str(call("GET", self._metrics_url, timeout_s=10.0))
        samples = re.findall(rf"^{name}(\S*) (\S+)$", text, re.MULTILINE)
        return sum(int(float(count)) for labels, count in samples if label in labels)

    def check_alive(self) -> None:
        """Start the router again where it is dead or hangs. RuntimeError, with its log's end: it may not be."""
        process = self._living("supervision")
        if time.monotonic() >= self._next_look:
            try:
                call("GET", self.url + "/liveness", timeout_s=_HANGS_S)
            except RuntimeError as error:
                if process.alive():  # else `_living` says of what it died
                    process.terminate(0.0)
                    self._start_again(RuntimeError(f"the router does not answer: {error}"))
                else:
                    self._living("supervision")
            self._register_again()
            self._next_look = time.monotonic() + _LOOK_S

    def find_fault(self) -> RuntimeError | None:
        """Return what the router died of, None while it lives; starts none."""
        if self._process is None or self._process.alive():
            return None
        return self._process.died(f"supervision of the router at {self.url}")

    def shutdown(self) -> None:
        if self._process is not None:
            self._process.terminate(timeout_s=5.0)

    def _living(self, purpose: str) -> ChildProcess:
        if self._process is None:
            raise RuntimeError(f"{purpose}: the router has not been started")
        if not self._process.alive():
            self._start_again(self._process.died(f"{purpose} of the router at {self.url}"))
        return self._process

    def _start_again(self, error: RuntimeError) -> None:
        """Start it at the same address; an engine that is dead as well is left to those who watch engines."""
        if self._on_death is None:
            raise error
        self._on_death(error)
        self._fixed_port, self._fixed_prometheus_port = (
            int(url.removesuffix("/metrics").rpartition(":")[2]) for url in (self.url, self._metrics_url)
        )
        self._num_retries_before, self._num_refusals_logged = self._num_retries, 0
        try:
            self.start()
        except (RuntimeError, ValueError) as failure:
            raise RuntimeError(f"the router died and cannot be started again at {self.url}: {failure}") from error
        self._not_back = set(self._workers)
        self._register_again()

    def _register_again(self) -> None:
        """Register engines that the router does not have since its start; those that it refuses again at each look."""
        if self._not_back:
            self._not_back = (self._not_back & self._workers.keys()) - {str(w["url"]) for w in self.workers()}
        for url in sorted(self._not_back):
            try:
                self._register(url, self._workers[url])
                self._not_back.discard(url)
            except RuntimeError as failure:
                logger.warning("the router does not take %s back: %s", url, failure)

    def _call(self, method: str, path: str, payload: Mapping[str, object] | None = None) -> object:
        process = self._living(path)
        try:
            return call(method, self.url + path, payload, api_key=self._api_key)
        except EndpointError:
            raise
        except RuntimeError:
            if not process.wait_exit(1.0):
                raise
            self._living(path)  # it died meanwhile: the new one answers
            return call(method, self.url + path, payload, api_key=self._api_key)


def _half_of_pair(url: str, api_key: str | None) -> dict[str, object]:
    """Ask an engine that prefills or decodes for what the router wants to know; RuntimeError if it does neither."""
    facts = as_object(call("GET", url + "/server_info", api_key=api_key, timeout_s=60.0), "/server_info")
    kind = facts.get("disaggregation_mode")
    if kind not in ("prefill", "decode"):
        raise RuntimeError(f"{url}/server_info: disaggregation_mode is {kind!r}; the router pairs prefill and decode")
    where = {"bootstrap_port": facts["disaggregation_bootstrap_port"]} if kind == "prefill" else {}
    return {"worker_type": kind, **where}


def _port(value: object) -> int | None:
    return None if value is None else int(str(value))
