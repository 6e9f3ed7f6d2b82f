"""A real Slurm of two nodes on this machine: slurmctld and two slurmd, with a folder of their own.

The daemons run as packaged (Debian: slurm-wlm, munge), as root, on ports of the loopback.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "munged", "munge")
CONF = """\
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
KillWait=30
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000
PartitionName=toy Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def missing() -> str:
    """Why no Slurm can be started here; empty if one can."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd are started as root"


@contextmanager
def toy_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start it; the environment variables with which sbatch and the others find it."""
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname(), folder=folder, ports=_free_ports(3)))
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    _start_munge()
    commands = [
        [_program("slurmctld"), "-D"],
        [_program("slurmd"), "-D", "-N", "n1"],
        [_program("slurmd"), "-D", "-N", "n2"],
    ]
    daemons = []
    try:
        for command in commands:
            words = [*map(str, command), "-f", str(conf)]
            quiet = subprocess.DEVNULL
            daemons.append(subprocess.Popen(words, env=environ, stdout=quiet, stderr=quiet))
            time.sleep(1)
        _await_nodes(environ)
        yield environ
    finally:
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=environ, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _start_munge() -> None:
    """It serves the machine: one that runs is used, and one that is started stays."""
    if _munge_works():
        return
    for folder in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        mode = "755" if folder.startswith("/run") else "700"
        subprocess.run(
            ["install", "-d", "-o", "munge", "-g", "munge", "-m", mode, folder], check=True
        )
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", str(_program("munged"))], check=True)
    deadline = time.monotonic() + 20
    while not _munge_works():
        assert time.monotonic() < deadline, "munged does not answer"
        time.sleep(0.2)


def _munge_works() -> bool:
    return subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0


def _await_nodes(environ: dict[str, str]) -> None:
    deadline = time.monotonic() + 90
    while True:
        command = ["sinfo", "--noheader", "--format=%t %D"]
        told = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False
        ).stdout
        if told.split() == ["idle", "2"]:
            return
        assert time.monotonic() < deadline, f"the nodes do not come: {told}"
        time.sleep(0.5)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
