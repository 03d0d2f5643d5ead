"""Hands a rendered job to the program that starts it: sbatch, kubectl, bash."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence

from meshkit.errors import ConfigError, RunError
from meshkit.verbs.launch.certificates import make_certificates
from meshkit.verbs.launch.job import Job
from meshkit.verbs.launch.jobset import Kubernetes, coordinator_host, jobset_yaml, secret_name, secret_yaml

_REMOVE = "kubectl delete jobset %s, and the same command again"


def submit(command: Sequence[str], text: str) -> str:
    """Runs the command with the text as its input.

    Returns:
        What it printed.

    Raises:
        ConfigError: the program is not on this machine.
        RunError: it refused.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not on this machine's PATH.", hint="--dry-run, which prints what would be handed to it"
        )
    done = subprocess.run(list(command), input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(f"{program} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}.")
    return done.stdout.strip()


def submit_jobset(job: Job, site: Kubernetes) -> str:
    """Creates a JobSet, and then the Secret with the certificates that its pods wait for.

    The private key is on no disk of this machine and on no command line. Kubernetes removes the Secret with the JobSet.

    Returns:
        What was created.

    Raises:
        ConfigError: kubectl, or what makes certificates, is not on this machine.
        RunError: kubectl refused.
    """
    files = make_certificates([coordinator_host(job)])
    made = submit(["kubectl", "create", "-f", "-", "-o", "json"], jobset_yaml(job, site))
    try:
        uid = str(json.loads(made)["metadata"]["uid"])
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"kubectl created JobSet {job.name}, but did not say its number.", hint=_REMOVE % job.name
        ) from None
    try:
        submit(["kubectl", "create", "-f", "-"], secret_yaml(job, site, files, uid))
    except RunError as e:
        message = f"the pods of JobSet {job.name} wait for Secret {secret_name(job)}, but {e.message}"
        raise RunError(message, hint=_REMOVE % job.name) from None
    return f"jobset.jobset.x-k8s.io/{job.name} and secret/{secret_name(job)} created"
