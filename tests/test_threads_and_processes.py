"""Several threads, two processes, objects that go in any order, and an exit in the middle."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from random import Random

import pytest
import torch

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import KVCache, OutOfMemory
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.kernels.attention import attend
from kvalloc.paged import PagedKVCache
from kvalloc.tests.host_children import PREAMBLE, run_well
from kvalloc.vmm import VmmKVCache

PAGE = 4096
WINDOW = 40
SMALL = KVGeometry("small", (LayerShape(1, 16), LayerShape(1, 16, WINDOW)), 1, "float32", 400)
MEMORY = 160 * PAGE
CACHES: dict[str, Callable[[], KVCache]] = {
    "contiguous": lambda: ContiguousKVCache(SMALL, MEMORY, policy="exact"),
    "paged": lambda: PagedKVCache(SMALL, MEMORY, 16),
    "vmm": lambda: VmmKVCache(SMALL, MEMORY, PAGE),
    "vmm and mapper": lambda: VmmKVCache(SMALL, MEMORY, PAGE, ahead_tokens=64, ahead_pages=2),
    "interleaved, and mapper": lambda: VmmKVCache(
        SMALL, MEMORY, PAGE, layout="interleaved", ahead_tokens=64
    ),
}


class Served:
    """A cache that one thread fills and another reads, with one lock around their verbs.

    Every value of a sequence is the sequence's number, so attention gives it back.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.live: list[int] = []
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.errors: list[BaseException] = []
        self.num_read = 0

    def fill(self, num_rounds: int) -> None:
        """Admit, grow, release; the oldest leaves when there is no room."""
        draw = Random(5)
        for number in range(num_rounds):
            with self.lock:
                self._admit(number, draw.randint(1, 90))
            for _ in range(4):
                with self.lock:
                    self._grow(draw.choice([1, 1, 7]))
            with self.lock:
                if len(self.live) > 5:
                    self.cache.release(self.live.pop(draw.randrange(len(self.live))))
                self.cache.check_invariants()

    def _admit(self, number: int, tokens: int) -> None:
        try:
            self.cache.admit(number, tokens, max_new=0)
        except OutOfMemory:
            self.cache.release(self.live.pop(0))
        else:
            self._write(number, tokens)
            self.live.append(number)

    def _grow(self, tokens: int) -> None:
        growing = [seq for seq in self.live if self.cache.length(seq) + tokens <= 400]
        refused = self.cache.grow(growing, tokens)
        for seq in growing:
            if seq not in refused:
                self._write(seq, tokens)

    def _write(self, seq: int, tokens: int) -> None:
        values = torch.full((tokens, 1, 16), float(seq))
        for layer in range(2):
            self.cache.write(layer, [seq], torch.zeros_like(values), values, lens=[tokens])

    def read(self) -> None:
        """Attend over whoever is there, until the filling has ended."""
        while not self.ended.wait(0.0005):  # a lock is not fair
            with self.lock:
                query = torch.ones(len(self.live), 1, 16)
                for layer, window in enumerate((None, WINDOW)):
                    view = self.cache.view(layer, self.live)
                    out = attend(query, view, window=window)
                    assert out[:, 0, 0].tolist() == pytest.approx(self.live)
                    del view
                self.num_read += len(self.live)

    def start(self, work: Callable[[], None]) -> threading.Thread:
        """A thread whose error is kept, and whose end ends the other one."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                self.ended.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads change places a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", CACHES)
def test_one_thread_reads_while_another_grows(name: str) -> None:
    """Two threads with one lock around their verbs, and the mapper, which has a lock of its own."""
    with CACHES[name]() as cache:
        served = Served(cache)
        threads = [served.start(lambda: served.fill(120)), served.start(served.read)]
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "the threads wait for each other"
        assert not served.errors, served.errors
        assert served.num_read
        if isinstance(cache, VmmKVCache) and cache.mapper is not None:
            assert cache.mapper.num_pages and not cache.mapper.num_failures


VERBS: dict[str, Callable[[VmmKVCache], object]] = {
    "admit": lambda cache: cache.admit("new", 9),
    "grow": lambda cache: cache.grow(["a"]),
    "fork": lambda cache: cache.fork("a", "child"),
    "truncate": lambda cache: cache.truncate("a", 9),
    "offload": lambda cache: cache.offload("a"),
    "restore": lambda cache: cache.restore("away"),
    "release": lambda cache: cache.release("a"),
    "reclaim": lambda cache: cache.reclaim(),
    "usage": lambda cache: cache.usage(),
    "check_invariants": lambda cache: cache.check_invariants(),
    "close": lambda cache: cache.close(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_comes_between_the_mapper_and_its_page(verb: str) -> None:
    """While the mapper has the books, every verb that reads or changes them waits."""
    with VmmKVCache(SMALL, MEMORY, PAGE) as cache:
        for seq in ("a", "away"):
            cache.admit(seq, 60)
        cache.offload("away")
        thread = threading.Thread(target=VERBS[verb], args=(cache,))
        with cache.pool.lock:  # as the mapper does
            thread.start()
            thread.join(0.05)
            assert thread.is_alive(), f"{verb} did not wait"
        thread.join(60)
        assert not thread.is_alive()


def test_close_waits_for_the_page_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapper must not put a page under addresses that are given up."""
    cache = VmmKVCache(SMALL, MEMORY, PAGE, ahead_tokens=64)
    mapper, map_ahead = cache.mapper, cache.map_ahead
    begun, may_end = threading.Event(), threading.Event()

    def slowly(row: int, distance: int, depth: int) -> int:
        begun.set()
        assert may_end.wait(60)
        return map_ahead(row, distance, depth)

    monkeypatch.setattr(cache, "map_ahead", slowly)
    cache.admit("a", 60)
    assert mapper is not None and begun.wait(60)
    closing = threading.Thread(target=cache.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "closed while the mapper is at work"
    may_end.set()
    closing.join(60)
    assert not closing.is_alive() and not mapper._thread.is_alive()
    assert mapper.num_pages and not mapper.num_failures


TWO = """
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.tests.state_machine import Walk
from kvalloc.vmm import VmmKVCache

shape = KVGeometry("small", (LayerShape(1, 16),) * 2, 1, "float32", 512)
cache = VmmKVCache(shape, 120 * 4096, 4096, ahead_tokens=16)
walk = Walk(cache, int(sys.argv[1]), max_prompt=200)
say("ready")
sys.stdin.readline()
for _ in range(25):
    for verb in (walk.admit, *[walk.grow] * 6):
        if verb == walk.admit or walk.tokens:
            verb()
    walk.read_back()
    while len(walk.tokens) > 4:
        walk.release()
    cache.check_invariants()
walk.release()
assert walk.done["grow"] > 50, walk.done
cache.close()
say("closed")
"""


def test_two_processes_use_the_host_driver_at_once() -> None:
    """Each reads back what it wrote, whatever the other one maps."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + TWO, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:  # both begin when both are there
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        assert child.communicate(timeout=120) == ("closed\n", "")
        assert child.returncode == 0


ORDERS = """
import gc
from itertools import permutations
import torch
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.physical import PhysicalPool

shape = KVGeometry("small", (LayerShape(1, 16),) * 2, 1, "float32", 512)

def everything(options):
    driver = HostDriver(G)
    pool = PhysicalPool(driver, 64 * G, G)
    cache = VmmKVCache(shape, pool=pool, **options)
    cache.admit("a", 200)
    cache.write(0, ["a"], torch.ones(1, 1, 16), torch.ones(1, 1, 16))
    view = cache.view(0, ["a"])
    newest = view.k[int(view.starts[0]) + 199]
    return {"driver": driver, "pool": pool, "cache": cache, "view": view, "k": newest}

def count():
    with open("/proc/self/maps") as maps:
        return len(maps.readlines())

before = count()
for options in ({}, {"ahead_tokens": 200}, {"guard": "zero"}):
    for order in permutations(["driver", "pool", "cache", "view"]):
        found = everything(options)
        if order[0] == "view":
            found["cycle"] = found
        for name in order:
            del found[name]
            gc.collect(0)
            assert found["k"].sum() == 16
        del found
gc.collect()
assert count() < before + 100, (before, count())
say("end")
"""


def test_driver_pool_cache_and_views_go_in_any_order() -> None:
    """A tensor is readable as long as it lives, and no mapping is left of 72 caches."""
    assert run_well(ORDERS) == "end\n"


ALIVE = """
import threading, time
import torch
from kvalloc.tests.test_threads_and_processes import CACHES, SMALL
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.physical import PhysicalPool

driver = HostDriver(G)
pool = PhysicalPool(driver, 64 * G, G)
caches = [make() for make in CACHES.values()]
caches += [VmmKVCache(SMALL, pool=pool), VmmKVCache(SMALL, pool=pool, ahead_tokens=64)]
caches += [VmmKVCache(SMALL, 64 * G, G, guard="zero", scrub=True)]
for cache in caches:
    cache.admit("a", 90, max_new=9)
    cache.admit("away", 20, max_new=9)
    cache.offload("away")
    cache.write(0, ["a"], torch.ones(1, 1, 16), torch.ones(1, 1, 16))
views = [cache.view(0, ["a"]) for cache in caches]
caches.append(caches)  # a cycle
first = views[3].k[int(views[3].starts[0])].data_ptr()

def work():
    while True:
        caches[3].grow(["a"])
        ctypes.memset(first, 1, 64)  # not by torch: what Python ends within C++ aborts
        caches[3].truncate("a", 90)

threading.Thread(target=work, daemon=True).start()
"""
HF = """
import kvalloc.hf.caches as hf
from kvalloc.tests.hf_updates import CONFIG, tokens, update
for kind in (hf.ContiguousCache, hf.PagedCache, hf.VmmCache):
    views.append(kind.from_config(CONFIG, max_length=64))
    views.append(update(views[-1], tokens(2, 9)))
"""


@pytest.mark.parametrize("end", ["", "sys.exit()"])
def test_the_interpreter_ends_silently_with_living_caches(end: str) -> None:
    """Caches of every kind, their views, mappers at work, and a thread in the middle of a verb."""
    script = ALIVE + (HF if find_spec("transformers") and not end else "")
    assert run_well(script + "time.sleep(0.2)\nsay('end')\n" + end) == "end\n"
