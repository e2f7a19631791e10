"""The same work, sent through Ray's own job submission.

    rayhicache up demo                       # in another terminal: a tier on a local Ray
    python examples/submit_job.py --name demo

Ray runs the script below on the cluster. It connects to the tier by name, answers a prompt and
prints what it got; here we wait, show what it printed, and end with its result. A Ray of your
own needs its dashboard (`pip install "ray[default]"`); say where with `--dashboard`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from ray.job_submission import JobStatus, JobSubmissionClient

SCRIPT = """
import sys
import rayhicache as hc

name, prompt = sys.argv[1:]
cluster = hc.connect(name)
for turn in ("cold", "again"):
    job = cluster.submit(hc.GenerateJob(prompts=[prompt * 40], max_new_tokens=8))
    (answer,) = job.result(timeout=60).outputs
    report = answer.report
    restored = report.restored_local_tokens + report.restored_remote_tokens
    print(f"{turn}: {restored} of {report.prompt_tokens} tokens restored: {list(answer.tokens)}")
    cluster.settle()
"""


def entrypoint(python: str, name: str, prompt: str) -> str:
    """The command that Ray runs on the cluster."""
    return shlex.join([python, "-c", SCRIPT, name, prompt])


def wait(client: JobSubmissionClient, job: str, seconds: float) -> JobStatus:
    """Wait until a job has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        status = client.get_job_status(job)
        if status.is_terminal() or time.monotonic() > deadline:
            return status
        time.sleep(0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Submit the script; 0 if it succeeded."""
    parser = argparse.ArgumentParser(description="Send work through Ray's job submission.")
    parser.add_argument("--name", default="default", help="of the tier")
    parser.add_argument("--prompt", default="Where does a page live? ")
    parser.add_argument("--dashboard", default="http://127.0.0.1:8265")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="the interpreter on the cluster's head that has rayhicache (default: this one's path)",
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    arguments = parser.parse_args(argv)

    client = JobSubmissionClient(arguments.dashboard)
    job = client.submit_job(
        entrypoint=entrypoint(arguments.python, arguments.name, arguments.prompt)
    )
    status = wait(client, job, arguments.timeout)
    print(client.get_job_logs(job), end="")
    print(f"job {job}: {status.value}")
    if not status.is_terminal():
        client.stop_job(job)
    return 0 if status is JobStatus.SUCCEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
