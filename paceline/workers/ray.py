"""Workers on a Ray cluster: an existing one, or one started on this machine for the run.

This is the only module that imports ray. Ray starts processes and carries messages. Paceline adds
what Ray does not guarantee (with remote/mailbox.py): messages are numbered in both directions and
repeated until they are acknowledged, so a lost, duplicated or reordered call takes effect once and
in order. A worker that sends nothing for SILENCE_S counts as dead, because Ray does not report
suspended processes.
"""

import asyncio
import atexit
import contextlib
import ctypes
import logging
import os
import pickle
import secrets
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.environment.remote import Launch
from paceline.errors import ConfigError, PacelineError, WorkerDied
from paceline.remote.group import Rank, WorkerGroup, start_rank
from paceline.remote.mailbox import PULL_S
from paceline.remote.worker import Build, Worker
from paceline.workers.cluster import Node, PlannedWorker, available_cores
from paceline.workers.ray_host import RayHost, oldest_gpu, smallest_gpu

try:
    import ray
    from ray._private import ray_constants
    from ray.exceptions import ActorUnavailableError, RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise ConfigError(
        f"cluster = 'ray' needs Ray ({error}): pip install 'paceline[ray]'"
    ) from error

log = logging.getLogger(__name__)

SILENCE_S = 30.0
RETRY_S = 0.05  # after a call that Ray could not deliver
# Ray's text if the machine of a worker replies that its process no longer listens. Ray itself
# declares the workers of a killed node dead after more than 10 s.
REFUSED = "Connection refused"
NODE_TIMEOUT_S = 1.0  # for a node to accept a connection
# Object store of a cluster that is started for the run: messages pass through it, weights do not.
STORE_BYTES = 200 << 20
RESERVE_TIMEOUT_S = 60.0
GCS_TIMEOUT_S = 10  # Ray waits this long for a control service that died; its default is 60
LOCAL = ("local", "127.0.0.1", "localhost")


class RayWorker(Rank):
    """A worker in a Ray actor: its host runs on a thread, and Ray carries the messages."""

    def __init__(
        self,
        name: str,
        node: str,
        host: str,
        actor: Any,
        log_path: Path,
    ) -> None:
        super().__init__(name, log_path)
        self.node, self.host, self._actor = node, host, actor
        self._outbox: list[Any] = []
        self._sent = 0  # number of messages sent
        self._more = asyncio.Event()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, build: Build, args: tuple[Any, ...]) -> None:
        self.send((build, args))
        self._tasks = [
            self._loop.create_task(self._guarded(work)) for work in (self._push, self._pull)
        ]

    async def address(self) -> tuple[str, int, int]:
        """Return host, port and descriptor of a socket that listens in the worker."""
        return await self._retried("address", self.host)

    def send(self, message: Any) -> None:
        self._outbox.append(message)
        self._more.set()

    async def _push(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            batch, self._outbox = self._outbox, []
            # Pickled here, so that the worker imports what they refer to after its environment is
            # set.
            await self._retried(
                "push", self._sent, [pickle.dumps(message, protocol=5) for message in batch]
            )
            self._sent += len(batch)

    async def _pull(self) -> None:
        received = printed = 0
        with self._log_path.open("ab") as output:
            while True:
                first, messages, text = await self._retried("pull", received, printed)
                printed += output.write(text)
                output.flush()
                for number, message in enumerate(messages, first):
                    if number >= received:
                        received = number + 1
                        self._take(pickle.loads(message))

    def _take(self, message: Any) -> None:
        if message is None:
            if not self._end.done():
                self._end.set_result(None)
        elif isinstance(message, BaseException):
            self._dead(message)
        else:
            self._receive(message)

    async def _retried(self, method: str, *args: Any) -> Any:
        """Call a method of the actor until there is a reply; all of them may be repeated."""
        while True:
            try:
                # Its start has a separate timeout: loading libraries can block all of its threads.
                async with asyncio.timeout(PULL_S + SILENCE_S if not self.starting else None):
                    return await getattr(self._actor, method).remote(*args)
            except ActorUnavailableError as error:
                if REFUSED in str(error):
                    raise
                log.info(
                    "worker %r: a lost call is sent again: %s",
                    self.name,
                    str(error).splitlines()[0],
                )
                await asyncio.sleep(RETRY_S)

    async def _guarded(self, work: Any) -> None:
        try:
            await work()
        except TimeoutError:
            self._unresponsive()
        except RayError as error:
            self._dead(error)
        except Exception as error:  # a message cannot be unpickled, or the log cannot be written
            self._dead(error)
            self.kill()

    def _unresponsive(self) -> None:
        if not self._closing:
            self.fence(
                WorkerDied(
                    f"worker {self.name!r} on node {self.node} did not respond for "
                    f"{SILENCE_S:g} s{self.last_lines()}"
                )
            )
            self.kill()

    def _exit_details(self) -> str:
        return f" on node {self.node}{self.last_lines()}"

    @property
    def title(self) -> str:
        return f"worker {self.name!r} on node {self.node}"

    def ask_stacks(self) -> Callable[[], str]:
        with contextlib.suppress(RayError):
            reply = self._actor.stacks.remote()
            return lambda: _reply(reply)
        return str

    def kill(self) -> None:
        ray.kill(self._actor)

    async def close(self) -> None:
        self._closing = True
        if self._tasks and not self.died.done():
            self.send(None)
            await asyncio.wait(
                {self._end, *self._tasks}, timeout=5, return_when=asyncio.FIRST_COMPLETED
            )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RayError):
            self.kill()


def _start_actor(options: dict[str, Any], environment: dict[str, str]) -> Any:
    return (
        ray.remote(RayHost)
        .options(max_restarts=0, max_task_retries=0, max_concurrency=8, **options)
        .remote(environment)
    )


def _reply(reply: Any) -> str:
    """Return the result of a call of an actor, or nothing as long as there is none."""
    try:
        return str(ray.get(reply, timeout=0))
    except RayError:
        return ""


class RayCluster:
    """A Ray cluster and the devices that this run has reserved."""

    _config: RunConfig  # set when it is opened, as the others
    _model_path: str
    _logs: Path

    def __init__(self, address: str) -> None:
        """Join the cluster at this address."""
        self._groups: dict[str, PlacementGroup] = {}  # by pool
        self._bundles: dict[str, tuple[PlacementGroup, list[int]]] = {}  # by worker
        self._started: Counter[str] = Counter()  # by node
        self._early: dict[tuple[str, int], Any] = {}  # actors by worker and rank
        self._early_plans: list[PlannedWorker] = []
        self._without_device: dict[str, str] = {}  # node of each environment worker
        _join(address)
        try:
            self._nodes = _nodes()
            self._addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        except BaseException:
            ray.shutdown()
            raise

    @classmethod
    async def open(cls, config: RunConfig, model_path: str, log_folder: Path) -> "RayCluster":
        if config.placement.overlap:
            raise ConfigError(
                "placement.overlap = true contradicts cluster = 'ray': it is for one process of "
                "this machine; set cluster = 'local', or give rollout a separate pool"
            )
        log_folder.mkdir(parents=True, exist_ok=True)
        joining = asyncio.create_task(asyncio.to_thread(_take_early_or_join, config.ray.address))
        try:
            cluster = await asyncio.shield(joining)
        except asyncio.CancelledError:  # the thread joins nevertheless
            with contextlib.suppress(Exception):
                await (await joining).close()
            raise
        cluster._config, cluster._model_path, cluster._logs = config, model_path, log_folder
        return cluster

    def nodes(self) -> list[Node]:
        return self._nodes

    def start_early(self, plans: Sequence[PlannedWorker]) -> None:
        """Start the processes of workers, which import their libraries but load no model."""
        self._reserve(plans)
        self._early_plans = list(plans)
        for plan in plans:
            for rank in range(plan.processes):
                actor = self._early[plan.name, rank] = self._start_rank(plan, rank)[1]
                actor.load.remote("paceline.workers.build")

    async def reserve(self, plans: Sequence[PlannedWorker]) -> None:
        """Reserve a placement group per pool, or raise if its devices are not available."""
        if self._early and list(plans) == self._early_plans:
            log.info("%d worker processes have started early", len(self._early))
        else:
            self._discard_early()
            self._reserve(plans)
        for pool, group in self._groups.items():
            if not await asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S):
                devices = [device for plan in plans if plan.pool == pool for device in plan.devices]
                raise ConfigError(
                    f"pool {pool!r} waited {RESERVE_TIMEOUT_S:g} s for "
                    f"{', '.join(map(str, devices))}: they are in use; free now: {_free()}"
                )

    def _reserve(self, plans: Sequence[PlannedWorker]) -> None:
        shared = Counter(device for plan in plans for device in plan.devices)
        gpus = any(node.gpus for node in self._nodes)
        for pool in dict.fromkeys(plan.pool for plan in plans):
            members = [plan for plan in plans if plan.pool == pool]
            devices = [device for plan in members for device in plan.devices]
            group = self._groups[pool] = placement_group(
                [{"GPU" if gpus else "CPU": 1 / shared[device]} for device in devices],
                strategy="PACK",
                bundle_label_selector=[{"ray.io/node-id": device.node} for device in devices],
            )
            indices = iter(range(len(devices)))
            for plan in members:
                self._bundles[plan.name] = group, [next(indices) for _ in plan.devices]

    def _discard_early(self) -> None:
        if not self._early:
            return
        for actor in self._early.values():
            ray.kill(actor)
        for group in self._groups.values():
            remove_placement_group(group)
        for state in (self._early, self._early_plans, self._groups, self._bundles, self._started):
            state.clear()

    async def start(self, plan: PlannedWorker) -> Worker:
        from paceline.workers.build import build_parts, first_rank_only  # imports torch

        args = (plan.roles, self._config, self._model_path, plan.threads)
        if not plan.ranks:
            worker = self._worker(plan, 0, plan.name, f"{plan.name}.log")
            worker.begin(build_parts, args)
            return worker
        ranks = [
            self._worker(plan, rank, f"{plan.name} rank {rank}", f"{plan.name}.{rank}.log")
            for rank in range(plan.ranks)
        ]
        try:
            host, port, descriptor = await ranks[0].address()
        except BaseException as error:
            for worker in ranks:
                worker.kill()
            if isinstance(error, RayError | TimeoutError):
                raise WorkerDied(f"worker {ranks[0].name!r} could not start: {error}") from error
            raise
        for rank, worker in enumerate(ranks):
            store = f"tcp://{host}:{port}" + (f"?fd={descriptor}" if rank == 0 else "")
            worker.begin(start_rank, (rank, plan.ranks, store, build_parts, args))
        return WorkerGroup(plan.name, ranks, first_rank_only(plan.roles))

    def launcher(self) -> Launch:
        return self._launch

    async def _launch(self, name: str, build: Build, args: tuple[Any, ...]) -> Worker:
        """Start a worker without a device on the node with the fewest per CPU slot.

        Nodes can join and leave.
        """
        gpus = any(node.gpus for node in self._nodes)
        slots = _cpu_slots()  # without a pause: others wait for the worker once it is listed
        if not slots:
            raise WorkerDied(f"worker {name!r} cannot start: no node of the Ray cluster is alive")
        self._without_device.pop(name, None)  # a replacement takes the place of the lost one
        taken = Counter(self._without_device.values())
        node = min(slots, key=lambda node: taken[node] / max(1, slots[node]))
        self._without_device[name] = node
        options = {
            # Without GPUs, CPU slots are the devices of the pools, which may have reserved them.
            "num_cpus": int(gpus),
            **_preferred(node),
        }
        variables = {"TOKENIZERS_PARALLELISM": "false"}
        log_path = self._logs / f"{name}.log"
        worker = RayWorker(name, node, "127.0.0.1", _start_actor(options, variables), log_path)
        worker.begin(build, args)
        return worker

    def _worker(self, plan: PlannedWorker, rank: int, name: str, log_name: str) -> RayWorker:
        if actor := self._early.pop((plan.name, rank), None):
            node = plan.devices[rank].node
        else:
            node, actor = self._start_rank(plan, rank)
        return RayWorker(name, node, self._addresses[node], actor, self._logs / log_name)

    def _start_rank(self, plan: PlannedWorker, rank: int) -> tuple[str, Any]:
        """Start on the reserved device; a late worker on the node with the fewest workers.

        Return the node and the actor.
        """
        gpus = any(node.gpus for node in self._nodes)
        if plan.name in self._bundles:
            group, indices = self._bundles[plan.name]
            node = plan.devices[rank].node
            share = group.bundle_specs[indices[rank]].get("GPU", 0)
            where: dict[str, Any] = {
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, indices[rank])
            }
        else:
            node, share = self._emptiest(gpus), float(gpus)
            where = (
                {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
                if gpus
                else _preferred(node)
            )
        self._started[node] += 1
        environment = {
            name: str(plan.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        } | {"TOKENIZERS_PARALLELISM": "false"}
        # The bundle reserves a CPU slot; the actor does not take it again, so that a replacement
        # does not wait for the old worker to end.
        options = {"num_cpus": 0, "num_gpus": share, **where}
        return node, _start_actor(options, environment)

    def _emptiest(self, gpus: bool) -> str:
        free = _free()
        able = [
            node for node in self._nodes if not gpus or free.get(node.name, {}).get("GPU", 0) >= 1
        ]
        if not able:
            raise PacelineError(f"no GPU is free for another worker; free now: {free}")
        return min(able, key=lambda node: self._started[node.name] / max(1, len(node.devices))).name

    async def close(self) -> None:
        for group in self._groups.values():
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        await asyncio.to_thread(ray.shutdown)


_early: "Future[RayCluster | None] | None" = None  # of this process, as Ray's connection


def start_early(address: str, plan: Callable[[Sequence[Node]], Sequence[PlannedWorker]]) -> None:
    """Join a cluster and start the processes of workers, on a thread while the caller continues.

    The next cluster that this process opens has them, if they are those of its plan.
    """
    global _early
    future = _early = Future()

    def start() -> None:
        cluster = None
        try:
            cluster = RayCluster(address)
            cluster.start_early(plan(cluster.nodes()))
            future.set_result(cluster)
        except BaseException as error:  # the run tries it again, and reports what fails then
            log.info("no worker starts early: %s", error)
            try:
                if cluster:
                    ray.shutdown()
            finally:
                future.set_result(None)
        # The kernel ends Ray's processes with the thread that started them.
        threading.Event().wait()

    atexit.register(future.result)  # a program that ends meanwhile waits
    threading.Thread(target=start, name="early start", daemon=True).start()


def _take_early_or_join(address: str) -> RayCluster:
    global _early
    early, _early = _early, None
    joined = early.result() if early else None
    return joined or RayCluster(address)


async def find_ray_nodes(address: str) -> list[Node]:
    """Return the nodes of a cluster without reserving anything."""
    if _early and (early := await asyncio.to_thread(_early.result)):
        return early.nodes()
    return await asyncio.to_thread(_join_and_leave, address)


def _join_and_leave(address: str) -> list[Node]:
    """Return the nodes. One call, so that a thread whose caller is cancelled leaves too."""
    _join(address)
    try:
        return _nodes()
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    """Connect, and keep our SIGTERM handler: Ray's would end the run without cleanup.

    This thread need not be the main thread, so the handler is set by the C function.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.argtypes, get.restype = [ctypes.c_int], ctypes.c_void_p
    put.argtypes, put.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = get(signal.SIGTERM)
    try:
        connect(address)
    finally:
        put(signal.SIGTERM, before)


def connect(address: str) -> None:
    """Connect to the cluster at `address`; "local": start one that only this machine reaches."""
    if ray.is_initialized():
        raise ConfigError(
            "Ray is already connected in this process; set ray.address to that cluster and let the "
            "run connect"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            # Otherwise Ray writes a permanent one to the user's home directory.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # As on macOS: listen to this machine only.
        usual = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            quiet["include_dashboard"] = False
            ray.init(
                address="local",
                num_cpus=len(available_cores()),
                object_store_memory=STORE_BYTES,
                _system_config={"gcs_rpc_server_reconnect_timeout_s": GCS_TIMEOUT_S},
                **quiet,
            )
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = usual
        return
    host, _, port = address.rpartition(":")
    # Workers on other machines run the code that runs here.
    code = {} if host in LOCAL else {"py_modules": [str(Path(__file__).parents[1])]}
    try:
        if port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address=address, runtime_env=code, **quiet)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"ray.address = {address!r}: cannot connect to a Ray cluster ({error}); "
            "start one with: ray start --head"
        ) from error


def _nodes() -> list[Node]:
    found = []
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and _listens(node):
            gpus, memory = int(resources.get("GPU", 0)), int(resources.get("memory", 0))
            name, cpus = node["NodeID"], int(resources.get("CPU", 0))
            gpu_memory, capability = (
                (_run_on(name, what) if gpus else 0) for what in (smallest_gpu, oldest_gpu)
            )
            found.append(Node(name, cpus, gpus, memory, gpu_memory, capability=capability))
    if not found:
        raise ConfigError("the Ray cluster has no living node")
    return found


def _listens(node: dict[str, Any]) -> bool:
    """Return whether a node may be alive: Ray lists one that was killed for more than 10 s."""
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, timeout=NODE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # Ray decides
        return True
    return True


def _preferred(node: str) -> dict[str, Any]:
    """Return options of an actor that starts on `node`, or elsewhere if it is gone.

    Ray ignores SPREAD and soft affinity for an actor that takes no resources: any node gets it.
    """
    return {
        "label_selector": {"ray.io/node-id": node},
        "fallback_strategy": [{"label_selector": {}}],
    }


def _cpu_slots() -> dict[str, int]:
    """Return the CPU slots of each living node."""
    return {
        node["NodeID"]: int(node["Resources"].get("CPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    }


def _run_on(node: str, what: Callable[[], int]) -> int:
    """Run a small function on a node."""
    options = {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return int(ray.get(ray.remote(what).options(**options).remote(), timeout=RESERVE_TIMEOUT_S))


def _free() -> dict[str, dict[str, float]]:
    """Return the free devices of each node."""
    per_node = ray._private.state.available_resources_per_node()
    return {
        node: {kind: amount for kind, amount in has.items() if kind in ("CPU", "GPU")}
        for node, has in per_node.items()
    }
