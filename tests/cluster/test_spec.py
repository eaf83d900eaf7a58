"""cluster.toml: good files, every kind of bad one, and a few hundred mutated ones."""

import random
from pathlib import Path

import pytest

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.errors import HolmesError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))
GOOD = """# two clusters
version = 2
name = "lab"

[ethernet]
rate = "25Gb/s"
latency = "40us"
interface = "eth0"

[[cluster]]
name = "a"
kind = "ib"
rate = "200Gb/s"
nodes = ["a[08-11]", "extra"]
processes = 8
gpu = "A100"
include = ["mlx5_*"]
exclude = ["mlx5_9"]

[[cluster]]
name = "b"
kind = "roce"
rate = "100Gb/s"
nodes = ["b[0-1]"]
processes = 8
latency = "5us"

[node.a08]
exclude = ["mlx5_3"]
ethernet = "bond0"
"""


def test_good_file():
    spec = parse_spec(GOOD, "lab.toml")
    assert (spec.name, spec.ethernet_rate_bps, spec.ethernet_interface) == (
        "lab",
        25 * 10**9,
        "eth0",
    )
    assert spec.ethernet_latency_s == pytest.approx(40e-6)
    a, b = spec.clusters
    assert a.nodes == ("a08", "a09", "a10", "a11", "extra")
    assert (a.kind, a.rate_bps, a.processes, a.fabric, a.gpu) == ("ib", 200 * 10**9, 8, "a", "A100")
    assert (a.include, a.exclude, a.latency_s) == (("mlx5_*",), ("mlx5_9",), 2e-6)
    assert b.latency_s == pytest.approx(5e-6)
    assert spec.overrides["a08"].ethernet == "bond0"
    assert spec.cluster_of("b1") is b and spec.cluster_by_node["a10"] is a
    assert (
        spec.known_as("b1") == spec.known_as("b1.site.org") == "b1"
        and spec.known_as("zz.site.org") == ""
    )
    with pytest.raises(HolmesError, match="node 'zz' is in no cluster"):
        spec.cluster_of("zz")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_samples_load(path):
    assert site_from_spec(load_spec(path)).world_size >= 4


def test_sample_with_16384_gpus():
    (path,) = [path for path in EXAMPLES if "16384" in path.stem]
    site = site_from_spec(load_spec(path))
    assert (site.world_size, len(site.clusters)) == (16384, 8)


def test_digest_is_of_the_content():
    assert parse_spec(GOOD, "x").digest == parse_spec("# more\n" + GOOD, "y").digest
    assert parse_spec(GOOD).digest != parse_spec(GOOD.replace("25Gb/s", "10Gb/s")).digest


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("version = 2", "", "'version' is missing"),
        ("version = 2", "version = 3", "'version' is 3; this holmes_ext reads version 2$"),
        (
            "version = 2",
            "version = 1",
            "'version' is 1; this holmes_ext reads version 2; write \"version = 2\"",
        ),
        ("version = 2", "version = true", "'version': True is not a whole number"),
        ("version = 2", "version = " + "9" * 5000, "not valid TOML"),
        ('[ethernet]\nrate = "25Gb/s"', "[ethernet]", "'ethernet.rate' is missing"),
        ("[ethernet]", "[network]", "'ethernet' is missing"),
        ('"25Gb/s"', '"25GB/s"', "'ethernet.rate': '25GB/s' is not a rate"),
        ('"40us"', '"40"', "'ethernet.latency': '40' is not a time"),
        ('interface = "eth0"', "interface = 3", "'ethernet.interface': 3 is not a text"),
        (
            'interface = "eth0"',
            'interfaces = "eth0"',
            "'ethernet.interfaces' is not known; did you mean 'interface'",
        ),
        (
            'kind = "ib"',
            'kind = "infiniband"',
            "'cluster.a.kind': 'infiniband' is not one of ib, roce, .* did you mean 'ib'",
        ),
        ('kind = "ib"', "", "'cluster.a.kind' is missing"),
        ('name = "b"', 'name = "a"', "'cluster.a': two clusters have this name"),
        ('name = "b"', 'name = "b b"', "'b b' is not a name"),
        ('name = "b"', "", r"'cluster\[1\].name' is missing"),
        ('["b[0-1]"]', "[]", "'cluster.b.nodes': cluster 'b' has no nodes"),
        ('["b[0-1]"]', '"b0"', "'cluster.b.nodes': 'b0' is not a list"),
        ('["b[0-1]"]', '["b[1-0]"]', "runs backwards"),
        ('["b[0-1]"]', '["b[0-999999999]"]', "names more than 100000 hosts"),
        ('["b[0-1]"]', '["b[0-' + "9" * 5000 + ']"]', "is not numbers such as"),
        ('["b[0-1]"]', '["b 0"]', "'b 0' is not a list of hosts"),
        ('["b[0-1]"]', '["b0", ""]', "'cluster.b.nodes': '' is not a host name"),
        ('["b[0-1]"]', '["-[0-1]"]', "'-0' is not a host name"),
        ('["b[0-1]"]', '["a09"]', "'cluster.b.nodes': node 'a09' is already in cluster 'a'"),
        ('["b[0-1]"]', '["b0", "b0"]', "node 'b0' is already in the same list"),
        (
            "processes = 8\nlatency",
            "processes = 0\nlatency",
            "'cluster.b.processes' must be 1 to 1024, not 0",
        ),
        ("processes = 8\nlatency", "rails = 9\nlatency", "'cluster.b.rails' must be 1 to 8, not 9"),
        (
            'kind = "roce"\nrate = "100Gb/s"',
            'kind = "ethernet"\nrails = 1',
            "'cluster.b.rails': nodes of kind 'ethernet' have no fast NIC; remove it",
        ),
        (
            "processes = 8\nlatency",
            "processes = 1.5\nlatency",
            "'cluster.b.processes': 1.5 is not a whole number",
        ),
        ('rate = "100Gb/s"\n', "", "'cluster.b.rate' is missing"),
        ('rate = "100Gb/s"', 'rate = "0Gb/s"', "'cluster.b.rate': a rate must be above 0"),
        (
            'kind = "roce"\nrate = "100Gb/s"',
            'kind = "ethernet"\nfabric = "x"',
            "'cluster.b.fabric': a cluster of kind 'ethernet' has no fast NIC",
        ),
        (
            'latency = "5us"',
            'fabric = "a"',
            "'cluster.b.fabric': fabric 'a' is ib in cluster 'a' and roce here",
        ),
        ('latency = "5us"', 'fabric = "ethernet"', "'ethernet' is the network of all nodes"),
        ('latency = "5us"', 'fabric = ""', "'cluster.b.fabric': '' is not a name"),
        ('latency = "5us"', 'speed = "5us"', "'cluster.b.speed' is not known"),
        (
            'latency = "5us"',
            "rate_bps = 5",
            "'cluster.b.rate_bps' is not known; did you mean 'rate'",
        ),
        ("[node.a08]", "[node.a8]", "'node.a8': no cluster has a node of that name; did you mean"),
        ("[node.a08]\n", "[node]\na08 = 3\n", "not known|not a table"),
        ("[[cluster]]", "[[clusters]]", "'cluster' is missing"),
        ("[[cluster]]", "[cluster]", "not valid TOML|list of tables"),
        ('nodes = ["b[0-1]"]', 'nodes = ["b[0-1]"', "not valid TOML.*line"),
    ],
)
def test_bad_file(old, new, message):
    assert old in GOOD
    with pytest.raises(HolmesError, match=message) as error:
        parse_spec(GOOD.replace(old, new), "lab.toml")
    assert str(error.value).startswith("lab.toml: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_file(text):
    with pytest.raises(HolmesError, match="f.toml: the file is empty"):
        parse_spec(text, "f.toml")


def test_unreadable_files(tmp_path):
    with pytest.raises(HolmesError, match="missing.toml: cannot be read .No such file"):
        load_spec(tmp_path / "missing.toml")
    with pytest.raises(HolmesError, match="cannot be read"):
        load_spec(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"version = 2 # \xff")
    with pytest.raises(HolmesError, match="cannot be read"):
        load_spec(tmp_path / "latin.toml")


def test_entries_of_nodes_are_lists_of_hosts():
    spec = parse_spec(GOOD.replace('["b[0-1]"]', '["gpu[098-101]x", "plain", "b[1,3-4],c0"]'))
    assert " ".join(spec.clusters[1].nodes) == "gpu098x gpu099x gpu100x gpu101x plain b1 b3 b4 c0"


def mutated(text, rng):
    """`text` after a few random cuts, copies, swaps and replacements."""
    junk = [
        '"',
        "[",
        "]",
        "=",
        "\n",
        "-1",
        "1e999",
        "9" * 400,
        "nan",
        "true",
        "[[",
        "'''",
        "\x00",
        "é",
        "{",
        "}",
        ",",
        "0",
        "[0-9]",
        '""',
    ]
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((0, 1, 3, 20)))
        action = rng.randrange(4)
        if action == 0:
            text = text[:start] + text[stop:]
        elif action == 1:
            text = text[:start] + rng.choice(junk) + text[stop:]
        elif action == 2:
            text = text[:start]
        else:
            lines = text.split("\n")
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            text = "\n".join(lines)
        text = text or " "
    return text


def test_mutated_files_give_a_site_or_one_clear_line():
    rng, good = random.Random(5), 0
    for _ in range(600):
        text = mutated(GOOD, rng)
        try:
            site_from_spec(parse_spec(text, "f.toml"))
            good += 1
        except HolmesError as error:
            assert str(error).startswith("f.toml: ")
    assert 20 < good < 580  # the mutations neither always nor never matter


def test_one_notation_for_ranges_of_hosts():
    text = (
        'version = 2\n[ethernet]\nrate = "1Gb/s"\n[[cluster]]\nname = "a"\nkind = "ethernet"\n'
        'nodes = ["gpu[001-002,020]", "b1, b2", "gpu00[4,7]"]\n'
        '[node."gpu[001-002]"]\nethernet = "eth1"\n[node."b1,b2"]\nethernet = "eth2"\n'
    )
    spec = parse_spec(text)
    names = ("gpu001", "gpu002", "gpu020", "b1", "b2", "gpu004", "gpu007")
    assert spec.clusters[0].nodes == names
    assert {host: override.ethernet for host, override in spec.overrides.items()} == {
        "gpu001": "eth1",
        "gpu002": "eth1",
        "b1": "eth2",
        "b2": "eth2",
    }
    with pytest.raises(HolmesError, match="node 'b1' has two tables"):
        parse_spec(text + "[node.b1]\n")


def test_the_reported_range_of_hosts(tmp_path):
    inputs = Path(__file__).parents[1] / "inputs" / "nodes_notation" / "cluster.toml"
    assert len(load_spec(inputs).clusters[0].nodes) == 17


def test_a_byte_order_mark_is_ignored(tmp_path):
    file = tmp_path / "cluster.toml"
    for encoding in ("utf-8-sig", "utf-16"):  # Windows editors and PowerShell
        file.write_text(GOOD, encoding=encoding)
        assert load_spec(file).clusters == parse_spec(GOOD).clusters


def test_two_ip_addresses_are_not_the_same_host():
    """They have the same text before the first dot."""
    text = GOOD.replace('"extra"', '"10.1.0.1"')
    assert parse_spec(text).known_as("10.1.0.1") == "10.1.0.1"
    assert parse_spec(text).known_as("10.2.0.1") == ""
