"""A JobSet for Kubernetes: one pod per machine, each with one launcher; see jobset.sigs.k8s.io."""

import json
import re
from dataclasses import dataclass

from phalanx.core.errors import UsageError

PORT = 29_400
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
INTERRUPTED = 75


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What the cluster is asked for.

    Attributes:
        name: of the JobSet; pods are `NAME-node-0-K-...`.
        nodes: how many machines.
        ranks_per_node: processes that the launcher of each starts.
        gpus: whether each rank takes a GPU, the resource `nvidia.com/gpu`.
        image: of the container, with phalanx[train] in it.
        claim: a volume claim that all pods can write (ReadWriteMany), mounted at `folder`.
        folder: where the run works, in the container.
        namespace: empty for that of whoever applies it.
        restarts: of the whole set after a failure that is no preemption.
        warning: seconds that a pod has to save, once it is asked to leave.
        command: the training, but for what the manifest adds.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gpus: bool = True
    image: str
    claim: str
    folder: str = "/work"
    namespace: str = ""
    restarts: int = 10
    warning: int = 300
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        """Reject names that Kubernetes would."""
        for option, name in (("--name", self.name), ("--volume", self.claim)):
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"{option} is {name!r}; Kubernetes takes lower-case letters, digits and -, "
                    "a letter first, at most 40"
                )
        if not self.image:
            raise UsageError("Kubernetes needs --image, a container with phalanx[train] in it")

    def to_yaml(self) -> str:
        """The manifest, for `kubectl apply -f`."""
        meet = f"{self.name}-node-0-0.{self.name}:{PORT}"
        words = [*self.command, "--nodes", str(self.nodes), "--rendezvous", meet]
        space = f"\n  namespace: {self.namespace}" if self.namespace else ""
        gpus = f"\n{_GPUS.format(count=self.ranks_per_node)}" if self.gpus else ""
        return _MANIFEST.format(
            name=self.name,
            space=space,
            restarts=self.restarts,
            nodes=self.nodes,
            interrupted=INTERRUPTED,
            warning=self.warning,
            image=json.dumps(self.image),
            command="\n".join(f"{' ' * 20}- {json.dumps(word)}" for word in words),
            folder=json.dumps(self.folder),
            claim=self.claim,
            port=PORT,
            gpus=gpus,
        )


_GPUS = """\
                  resources:
                    limits:
                      nvidia.com/gpu: {count}"""

_MANIFEST = """\
# Each pod is one machine: its launcher starts the ranks there, and starts them again if one dies.
# A pod that is asked to leave saves and ends with {interrupted}, which counts as no failure.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}{space}
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: {restarts}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {nodes}
          parallelism: {nodes}
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: Ignore
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [{interrupted}]
              - action: Ignore
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {warning}
              containers:
                - name: train
                  image: {image}
                  workingDir: {folder}
                  command:
{command}
                  ports:
                    - containerPort: {port}{gpus}
                  volumeMounts:
                    - name: runs
                      mountPath: {folder}
                    - name: shared-memory
                      mountPath: /dev/shm
              volumes:
                - name: runs
                  persistentVolumeClaim:
                    claimName: {claim}
                - name: shared-memory
                  emptyDir:
                    medium: Memory
"""
