"""An owner as a process of its own, which tests kill. Speaks JSON lines on its output.

hold PID      attach that process, store pages 1 to 3, lease page 1 and fill page 9 for it
churn SEED    store page after page for ever, evicting, and say how many were stored
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from arenas import key, keys, open_owner, plain_layout, store
from rayhicache.memory.process import ProcessIdentity, start_time_of, this_process


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def hold(root: Path, pid: int) -> None:
    owner = open_owner(root)
    own = this_process("worker")
    start_time = start_time_of(pid)
    assert start_time is not None
    worker = ProcessIdentity(
        pid=pid, start_time=start_time, pid_namespace=own.pid_namespace, client="worker"
    )
    session = owner.attach(plain_layout(), worker).session
    store(owner, session, keys(1, 2, 3))
    hit = owner.lookup(keys(1), session)
    reserved = owner.reserve(keys(9), session)
    assert hit.lease is not None
    assert reserved is not None
    say(
        session=session,
        lease=hit.lease.id,
        reading=[list(ref) for ref in hit.lease.refs()],
        writing=[list(fill.ref) for fill in reserved.fills],
    )
    sys.stdin.read()


def churn(root: Path, seed: int) -> None:
    owner = open_owner(root)
    session = owner.attach(plain_layout(), this_process("churn")).session
    for number in itertools.count(seed):
        store(owner, session, [key(number)])
        say(stored=number, pid=os.getpid())


if __name__ == "__main__":
    {"hold": hold, "churn": churn}[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3]))
