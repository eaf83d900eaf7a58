"""Which network plugin NCCL would load on a node, and the name of its network, read without loading it."""

import net_plugins
import pytest

from holmes_ext.cluster import net_plugin
from holmes_ext.cluster.elf import Library
from holmes_ext.cluster.fabric import is_same_network, kinds_of_network
from holmes_ext.cluster.nccl import file_settings
from holmes_ext.cluster.net_plugin import (
    find_net_plugin,
    may_carry,
    nccl_of_node,
    network_of,
)
from holmes_ext.cluster.nic import Nic

EFA = Nic(kind="efa", device="rdmap64s0", port=1, state="up", state_text="ACTIVE")


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    """NCCL's configuration files are absent, and the loader searches LD_LIBRARY_PATH alone."""
    monkeypatch.setattr(file_settings, "__defaults__", (str(tmp_path / "nccl.conf"),))
    monkeypatch.setattr(net_plugin, "_FOLDERS", ())


@pytest.mark.parametrize(
    "name", ["Libfabric", "AWS Libfabric", "FasTrak", "gIB", "GPUDirectTCPX_v7"]
)
def test_the_name_is_read_and_the_plugin_is_not_loaded(tmp_path, name):
    path = net_plugins.build_plugin(tmp_path / "libnccl-net.so", name)
    assert network_of(str(path)) == name
    found = find_net_plugin({"LD_LIBRARY_PATH": str(tmp_path)}, None)
    assert (found.path, found.network, found.problem) == (str(path), name, "")
    assert not (tmp_path / "libnccl-net.so.loaded").exists()


def test_the_name_is_found_by_the_entry_for_the_loader_alone(tmp_path):
    """Some linkers leave zeros in the table, where GNU's writes the same address as in the entry."""
    path = net_plugins.build_plugin(tmp_path / "libnccl-net.so", "Libfabric")
    library = Library(path)
    (address,) = [symbol.address for symbol in library.symbols if "ncclNetPlugin" in symbol.name]
    offset = library._offset_of(address)
    content = bytearray(path.read_bytes())
    content[offset : offset + 8] = bytes(8)
    path.write_bytes(content)
    assert network_of(str(path)) == "Libfabric"


def test_the_name_is_found_in_a_library_with_compact_relocations(tmp_path):
    """DT_RELR has no entry for each pointer: the address stands in the table itself."""
    option = "-Wl,-z,pack-relative-relocs"
    path = net_plugins.build_plugin(tmp_path / "libnccl-net.so", "Libfabric", option=option)
    assert network_of(str(path)) == "Libfabric"


def test_the_table_of_the_highest_version_counts(tmp_path):
    path = net_plugins.build_plugin(tmp_path / "libnccl-net.so", "Libfabric", "AWS Libfabric")
    assert network_of(str(path)) == "Libfabric"


def test_a_name_that_the_plugin_changes_when_it_starts_is_not_requested(tmp_path):
    """The plugin of NVIDIA's containers is for InfiniBand and RoCE, and then called UCX or IBext."""
    path = net_plugins.build_plugin(tmp_path / "libnccl-net.so", "NCCL RDMA Plugin v10")
    node = nccl_of_node({"NCCL_NET_PLUGIN": str(path)}, [])
    assert (node.network, node.request_name) == ("NCCL RDMA Plugin v10", "")
    assert may_carry(node.network, "roce") and not may_carry(node.network, "efa")


@pytest.mark.parametrize(
    "content", [b"", b"text", b"\x7fELF\x02\x01" + bytes(10), b"\x7fELF\x02\x01" + b"\xff" * 200]
)
def test_the_name_of_a_damaged_plugin_is_unknown(tmp_path, content):
    path = tmp_path / "libnccl-net.so"
    path.write_bytes(content)
    assert network_of(str(path)) == ""
    assert find_net_plugin({"LD_LIBRARY_PATH": str(tmp_path)}, None).path == str(path)


def test_a_library_without_tables_has_no_network(tmp_path):
    assert network_of(str(net_plugins.build_plugin(tmp_path / "libfabric.so"))) == ""


def test_a_plugin_whose_library_is_missing_cannot_be_used(tmp_path):
    (tmp_path / "lib").mkdir()
    needed = net_plugins.build_plugin(tmp_path / "lib" / "libabsent.so.1")
    path = net_plugins.build_plugin(tmp_path / "libnccl-net.so", "Libfabric", needs=needed)
    environ = {"LD_LIBRARY_PATH": f"{tmp_path}:{tmp_path / 'lib'}"}
    assert find_net_plugin(environ, None).problem == ""
    needed.unlink()
    found = find_net_plugin(environ, None)
    assert found.network == "Libfabric" and not found.is_ready
    assert f"{path} needs " in found.problem and "libabsent.so.1" in found.problem


@pytest.mark.parametrize(
    "requested, found",
    [
        (None, "libnccl-net.so"),
        ("ofi", "libnccl-net-ofi.so"),
        ("spcx,ofi", "libnccl-net-ofi.so"),
        ("FOLDER/libnccl-net.so", "libnccl-net.so"),
        ("none", ""),
        ("", ""),
        ("spcx", ""),
    ],
)
def test_a_plugin_is_found_as_nccl_would(tmp_path, requested, found):
    for name in ("libnccl-net.so", "libnccl-net-ofi.so"):
        (tmp_path / name).write_text("")
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    wanted = requested and requested.replace("FOLDER", str(tmp_path))
    plugin = find_net_plugin(environ, wanted)
    assert plugin.path == (str(tmp_path / found) if found else "")
    assert bool(plugin.problem) == (not found)
    if requested == "spcx":
        assert "NCCL_NET_PLUGIN=spcx names no library" in plugin.problem


def test_a_plugin_that_only_lacks_its_setting_is_named(tmp_path):
    """Newer releases of aws-ofi-nccl are libnccl-net-ofi.so, which NCCL does not load by itself."""
    path = net_plugins.build_plugin(tmp_path / "libnccl-net-ofi.so", "Libfabric")
    plugin = find_net_plugin({"LD_LIBRARY_PATH": str(tmp_path)}, None)
    assert not plugin.path and f"export NCCL_NET_PLUGIN={path}" in plugin.problem


def test_names_of_one_network():
    """NCCL compares names without case, and aws-ofi-nccl has had three names."""
    assert is_same_network("libfabric", "Libfabric")
    assert is_same_network("AWS Libfabric", "OFI") and not is_same_network("gIB", "IB")


@pytest.mark.parametrize(
    "network, kind, answer",
    [
        ("Libfabric", "efa", True),
        ("AWS Libfabric", "slingshot", True),
        ("Libfabric", "gvnic", False),
        ("FasTrak", "gvnic", True),
        ("GPUDirectTCPX_v7", "gvnic", True),
        ("gIB", "gvnic", False),
        ("gIB", "efa", False),
        ("UCX", "efa", False),
        ("gIB", "plugin", True),
        ("Somebody's", "efa", True),
        ("Somebody's", "gvnic", False),
    ],
)
def test_the_kinds_of_nics_that_a_network_uses(network, kind, answer):
    assert may_carry(network, kind) == answer
    assert kinds_of_network("gib") == ("roce",) and kinds_of_network("Somebody's") == ()


def test_a_node_reports_its_plugin_and_the_users_choice(tmp_path):
    path = net_plugins.build_plugin(tmp_path / "libnccl-net-ofi.so", "Libfabric")
    environ = {"NCCL_NET": "AWS Libfabric", "NCCL_NET_PLUGIN": str(path), "HOLMES_SYSFS": "/tree"}
    node = nccl_of_node(environ, [EFA])
    assert (node.plugin, node.network, node.plugin_problem) == (str(path), "Libfabric", "")
    assert node.has_plugin and node.requested_net == "AWS Libfabric"


def test_a_file_of_nccl_names_the_plugin(tmp_path):
    path = net_plugins.build_plugin(tmp_path / "mine.so", "Mine")
    (tmp_path / "nccl.conf").write_text(f"NCCL_NET_PLUGIN={path}\n")
    assert nccl_of_node({}, []).network == "Mine"
    assert not nccl_of_node({"NCCL_NET_PLUGIN": "none"}, []).has_plugin


def test_a_file_of_nccl_names_the_network(tmp_path):
    (tmp_path / "nccl.conf").write_text("NCCL_NET=FastSocket\n")
    assert nccl_of_node({}, []).requested_net == "FastSocket"
    assert nccl_of_node({"NCCL_NET": "gIB"}, []).requested_net == "gIB"


def test_nics_without_their_device_file_cannot_be_used(tmp_path, monkeypatch):
    """A container may have the plugin and lack the devices: its NCCL would fail at the first group."""
    path = net_plugins.build_plugin(tmp_path / "libnccl-net.so", "Libfabric")
    monkeypatch.setattr(
        "holmes_ext.cluster.net_plugin.DEVICE_FILES", {"efa": f"{tmp_path}/uverbs*"}
    )
    environ = {"NCCL_NET_PLUGIN": str(path)}
    node = nccl_of_node(environ, [EFA])
    assert not node.has_plugin
    assert f"rdmap64s0:1 has no device file {tmp_path}/uverbs*" in node.plugin_problem
    (tmp_path / "uverbs0").write_text("")
    assert nccl_of_node(environ, [EFA]).has_plugin
