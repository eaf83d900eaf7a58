"""All faults of test_faults.py, several at a time: most of each is waiting.

    make faults [WORKERS=6]
    python integration_tests/joined/side_by_side.py [--workers 6] [pytest's arguments]

Status 1 where one fails; what the failing ones printed stands at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = "integration_tests/joined/test_faults.py"
#: Once nothing else runs: it looks at what is left.
LAST = "test_no_process_or_thread_is_left"


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    env = {**os.environ, "HOLMES_TEST_FULL": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=6)
    args, more = parser.parse_known_args()
    begin = time.monotonic()
    listed = pytest("--collect-only", TESTS, *more)
    names = [line for line in listed.stdout.splitlines() if "::" in line and LAST not in line]
    if not names:
        print(listed.stdout)
        return 2
    failed: list[str] = []

    def run(name: str) -> None:
        started = time.monotonic()
        done = pytest("--timeout", "600", name)
        became = "FAILED" if done.returncode else "passed"
        print(f"{time.monotonic() - started:5.0f} s  {became}  {name}", flush=True)
        if done.returncode:
            failed.append(done.stdout)

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(run, names))
    for output in failed:
        print(output)
    took = time.monotonic() - begin
    print(f"{len(names) - len(failed)} of {len(names)} passed in {took:.0f} s, {args.workers} at a time")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
