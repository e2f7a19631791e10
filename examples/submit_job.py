"""The same work, sent through Ray's own job submission.

    rayhicache up demo                       # in another terminal: a tier on a local Ray
    python examples/submit_job.py --name demo

Ray runs the script below on the cluster. It connects to the tier by name, answers a prompt twice
and prints what it got; here we wait, show what it printed, and end with its result:

    cold: 0 of 241 tokens restored; the answer's tokens: [64982, 22947, 60746, ...
    again: 192 of 241 tokens restored; the answer's tokens: [64982, 22947, 60746, ...
    job raysubmit_LwHaT7n4uWNmGrPG: SUCCEEDED

The second time three whole pages of 64 tokens come from the tier, and the answer is the same. Its
tokens mean nothing: the model's weights are random. A Ray of your own needs its dashboard
(`pip install "ray[default]"`); say where with `--dashboard`.
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
    print(f"{turn}: {restored} of {report.prompt_tokens} tokens restored; ", end="")
    print(f"the answer's tokens: {list(answer.tokens)}")
    cluster.settle()
"""


def entrypoint(python: str, name: str, prompt: str) -> str:
    """The command that Ray runs on the cluster."""
    return shlex.join([python, "-c", SCRIPT, name, prompt])


def printed(logs: str, command: str) -> str:
    """What the script itself printed: before it stand Ray's own lines and the command."""
    _, found, after = logs.partition(f"{command}\n")
    return after if found else logs


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
    parser.add_argument(
        "--prompt", default="Where does a page live? ", help="it is sent forty times in a row"
    )
    parser.add_argument(
        "--dashboard",
        default="http://127.0.0.1:8265",
        help="of the Ray, as `rayhicache up` told it (default: %(default)s)",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="the interpreter on the cluster's head that has rayhicache (default: this one's path)",
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    arguments = parser.parse_args(argv)

    client = JobSubmissionClient(arguments.dashboard)
    command = entrypoint(arguments.python, arguments.name, arguments.prompt)
    job = client.submit_job(entrypoint=command)
    status = wait(client, job, arguments.timeout)
    print(printed(client.get_job_logs(job), command), end="")
    print(f"job {job}: {status.value}")
    if not status.is_terminal():
        client.stop_job(job)
    return 0 if status is JobStatus.SUCCEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
