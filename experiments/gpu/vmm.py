"""gpu-check, stage vmm: mapped memory does on the device what the books say it does."""

from __future__ import annotations

from ...contract import OutOfMemory
from ...vmm.driver import Driver, DriverError
from .mapped import give_back, holds, make_cache, mapped, write
from .stage import NotHere, StageReport, Target, require

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


def run(report: StageReport, target: Target) -> None:
    """Aliases, dtypes, growth between kernels, every verb, refusals, and what comes back."""
    driver = target.driver()
    report.settings |= {"granularity": driver.granularity}
    checks = {
        "one page at two addresses": _aliases,
        "tensors of every dtype": _dtypes,
        "growth between queued kernels": _growth,
        "a thread maps ahead": _ahead,
        "verbs keep every token": _verbs,
        "a window lets go of pages": _window,
        "scrubbed pages are zero": _scrub,
        "closing under living views is refused": _closing,
        "out of memory is a refusal and passes": _exhaustion,
    }
    for name, check in checks.items():
        with report.check(name):
            check(driver, target)
    with report.check("everything is given back"):
        require(driver.num_views == 0, f"{driver.num_views} tensors are alive")
        in_use = getattr(driver, "bytes_in_use", 0)
        require(in_use == 0, f"{in_use} bytes are still in use")
        driver.close()
    report.headline = f"{sum(entry['ok'] is True for entry in report.checks)} checks right"


def _aliases(driver: Driver, target: Target) -> None:
    import torch

    size = driver.granularity
    address = driver.reserve(4 * size)
    page = driver.create(size)
    for i in (0, 2):
        driver.map(address + i * size, size, page)
        driver.allow(address + i * size, size)
    whole = driver.tensor(address, (4 * size // 4,), torch.float32)
    first, third = whole[: size // 4], whole[size // 2 : size // 2 + size // 4]
    first.copy_(torch.arange(size // 4, dtype=torch.float32))
    require(torch.equal(first, third), "what was written at one address is not at the other")
    third[-1] = -1
    require(float(first[-1]) == -1, "a write at the second address is not at the first")
    del whole, first, third
    driver.wait(driver.fence())
    for i in (0, 2):
        driver.unmap(address + i * size, size)
    driver.release(page)
    driver.free(address, 4 * size)


def _dtypes(driver: Driver, target: Target) -> None:
    import torch

    address, pages = mapped(driver, 1)
    for name in DTYPES:
        dtype = getattr(torch, name)
        tensor = driver.tensor(address, (4, 8), dtype)
        require(tensor.device == target.device, f"{name} lies on {tensor.device}")
        wanted = torch.arange(32, dtype=torch.float32, device=target.device).view(4, 8)
        tensor.copy_((wanted % 8).to(dtype))
        require(torch.equal(tensor.float(), wanted % 8), f"{name} does not read as written")
        del tensor
    give_back(driver, address, pages)


def _growth(driver: Driver, target: Target) -> None:
    """Pages appear under addresses beside those that queued kernels read; nothing waits."""
    with make_cache(driver) as cache:
        per_page = cache.prefix_index.unit_tokens
        numbers = list(range(per_page - 1))
        cache.admit("a", len(numbers))
        write(cache, "a", numbers)
        sums = []
        for step in range(1, 7):
            read = cache.view(1, ["a"]).v[: per_page - 1, :, 2]  # 1 + the layer's number
            sums.append(read.float().sum())
            del read
            new = [1000 * step + i for i in range(per_page)]
            require(not cache.grow(["a"], per_page), "growth was refused")
            write(cache, "a", new)
            numbers += new
        holds(cache, "a", numbers)
        expected = (per_page - 1) * 8 * 2
        seen = [float(value) for value in sums]
        require(seen == [expected] * len(seen), f"queued kernels read {seen}, not {expected}")


def _ahead(driver: Driver, target: Target) -> None:
    """Driver calls from two threads; what was mapped ahead is there and makes growth free."""
    with make_cache(driver, ahead_tokens=1) as cache:
        mapper = cache.mapper
        require(mapper is not None, "no thread was started")
        assert mapper is not None
        per_page = cache.prefix_index.unit_tokens
        numbers = list(range(per_page))
        cache.admit("a", per_page)
        write(cache, "a", numbers)
        for step in range(1, 4):
            mapper.wait()
            require(mapper.num_failures == 0, "mapping ahead failed")
            require(mapper.num_pages >= 4 * step, f"{mapper.num_pages} pages were mapped ahead")
            new = [1000 * step + i for i in range(per_page)]
            require(not cache.grow(["a"], per_page), "growth was refused")
            write(cache, "a", new)
            numbers += new
        holds(cache, "a", numbers)


def _verbs(driver: Driver, target: Target) -> None:
    with make_cache(driver) as cache:
        unit = cache.prefix_index.unit_tokens
        prompt = list(range(2 * unit + 5))
        prefix = [(number, 1) for number in prompt]
        cache.admit("a", len(prompt), prefix=prefix)
        write(cache, "a", prompt)
        cached = cache.admit("b", len(prompt), prefix=prefix)
        require(cached == 2 * unit, f"{cached} tokens of a known prefix were found")
        write(cache, "b", prompt[cached:])
        cache.fork("a", "c")
        own = {"a": [7001], "b": [7002], "c": [7003]}
        cache.grow(list(own))
        for seq, numbers in own.items():
            write(cache, seq, numbers)
        for seq, numbers in own.items():
            holds(cache, seq, prompt + numbers)
        cache.truncate("c", unit + 1)
        cache.offload("a")
        holds(cache, "c", prompt[: unit + 1])
        cache.release("b")
        cache.restore("a")
        holds(cache, "a", [*prompt, 7001])
        cache.check_invariants()


def _window(driver: Driver, target: Target) -> None:
    with make_cache(driver, window=100) as cache:
        unit = cache.prefix_index.unit_tokens
        numbers = list(range((100 // unit + 2) * unit))
        cache.admit("a", len(numbers))
        write(cache, "a", numbers)
        cache.grow(["a"])
        numbers.append(len(numbers))
        write(cache, "a", numbers[-1:])
        held = int(cache.view(0, ["a"]).lengths[0])
        require(100 <= held < len(numbers), f"{held} of {len(numbers)} tokens are mapped")
        holds(cache, "a", numbers)


def _scrub(driver: Driver, target: Target) -> None:
    with make_cache(driver, scrub=True) as cache:
        num = 2 * cache.prefix_index.unit_tokens
        for reclaims in (False, True):
            cache.admit("a", num)
            write(cache, "a", [99] * num)
            cache.release("a")
            if reclaims:
                cache.reclaim()
            cache.admit("b", num)
            view = cache.view(0, ["b"])
            start = int(view.starts[0])
            seen = float(view.k[start : start + num].float().abs().max())
            del view
            cache.release("b")
            require(seen == 0, f"remains of {seen} are seen")


def _closing(driver: Driver, target: Target) -> None:
    cache = make_cache(driver)
    cache.admit("a", 10)
    write(cache, "a", range(10))
    view = cache.view(0, ["a"])
    try:
        cache.close()
    except DriverError:
        holds(cache, "a", range(10))
    else:
        require(False, "a cache closed under a living view")
    del view
    cache.close()


def _exhaustion(driver: Driver, target: Target) -> None:
    """All the memory there is, in large pages; then a refusal; then all of it again."""
    if target.kind == "cpu":
        raise NotHere("main memory is not filled up for a check")
    size = (1 << 30) if target.is_gpu else 64 * driver.granularity
    counts = []
    for _ in range(2):
        pages: list[int] = []
        try:
            while True:
                pages.append(driver.create(size))
        except OutOfMemory as refusal:
            require(not refusal.fragmented, f"the refusal says that there is room: {refusal}")
        finally:
            for page in pages:
                driver.release(page)
        counts.append(len(pages))
    require(counts[0] > 0 and counts[1] >= counts[0] - 1, f"{counts} pages in two rounds")
