"""The manifests against the schemas that Kubernetes publishes, strictly: a key that there is not is
a mistake.

The package kubernetes-validate has the schemas: pip install zmqdist[engines]. It is large, so that
`make test` compares the keys with the models of the client of Kubernetes instead
(tests/launch/test_kubernetes.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.helpers import documents
from tests.launch.test_kubernetes import FULL, IMAGE, JOBS, TOP
from zmqdist.cluster import ClusterConfig
from zmqdist.launch.kubernetes import render

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs pip install zmqdist[engines]"
)

OLDEST = "1.28"
"""The first version that labels a pod of a StatefulSet with its index, by which a task knows which
one it is."""


def versions() -> list[str]:
    newest = kubernetes_validate.latest_version()
    return [OLDEST, newest]


@pytest.mark.parametrize("text", [FULL, TOP + JOBS + IMAGE])
@pytest.mark.parametrize("version", versions())
def test_manifests_fit_schemas(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    for each in documents(render(ClusterConfig.load(tmp_path / "cluster.yaml", "kubernetes"))):
        kubernetes_validate.validate(each, version, strict=True)


def test_unknown_key_is_noticed() -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a"},
        "spec": {"selektor": {}},
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, OLDEST, strict=True)
