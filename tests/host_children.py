"""Runs a script that uses the host driver in a process of its own, where it may die.

A script that is to die says something before, so that one that dies too early, or for another
reason, does not pass.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

if not hasattr(os, "memfd_create"):
    pytest.skip("the host driver needs Linux", allow_module_level=True)

PREAMBLE = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from kvalloc.contract import OutOfMemory
from kvalloc.vmm import system
from kvalloc.vmm.driver import DriverError
from kvalloc.vmm.host import HostDriver

G = 4 * system.OS_PAGE

def mapped(driver, num_pages, num_free=0):
    address = driver.reserve((num_pages + num_free) * G)
    for i in range(num_pages):
        driver.map(address + i * G, G, driver.create(G))
    driver.allow(address, num_pages * G)
    return address

def peek(address):
    return ctypes.string_at(address, 1)[0]

def say(word):
    print(word, flush=True)
"""


def run(script: str, *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", PREAMBLE + script],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_well(script: str) -> str:
    """What the child said; it must end well and silently."""
    child = run(script)
    if child.returncode or child.stderr:
        pytest.fail(f"the child ended with {child.returncode}: {child.stdout}{child.stderr}")
    return child.stdout


def run_to_death(script: str) -> str:
    """What the child said before the processor stopped it."""
    child = run(script)
    assert child.returncode == -signal.SIGSEGV, child.stderr
    return child.stdout
