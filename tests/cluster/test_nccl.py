"""What NCCL would find on a node: read from files laid out here, by the rules of NCCL's source."""

import os
import pwd
from types import SimpleNamespace

import pytest

from holmes_ext.cluster import net_plugin
from holmes_ext.cluster.nccl import (
    file_settings,
    why_no_verbs,
)
from holmes_ext.cluster.net_plugin import nccl_of_node
from holmes_ext.cluster.nic import Nic

IB = Nic(kind="ib", device="mlx5_0", port=1, state="up", state_text="ACTIVE")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return write("home/.nccl.conf", text) and the environment that points there.

    /etc/nccl.conf is tmp_path/etc.
    """
    monkeypatch.setattr(file_settings, "__defaults__", (str(tmp_path / "etc"),))
    (tmp_path / "home").mkdir()
    entry = SimpleNamespace(pw_dir=str(tmp_path / "home"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)

    def write(name, text):
        (tmp_path / name).write_text(text)
        return {"HOME": "/elsewhere"}  # NCCL looks into the user database

    return write


def test_a_user_without_an_entry_has_no_file_of_their_own(files, tmp_path, monkeypatch):
    def missing(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", missing)
    files("etc", "NCCL_DEBUG=INFO\n")
    assert file_settings({}) == {"NCCL_DEBUG": ("INFO", str(tmp_path / "etc"))}


def test_values_are_the_rest_of_the_line_as_in_nccl(files):
    """strncpy() in param.cc: a comment, quotes, and the end of a Windows line belong to the value."""
    files("etc", 'NCCL_A=1 # one\r\nNCCL_B="x"\nNCCL_C =3\n')
    values = {name: setting.value for name, setting in file_settings({}).items()}
    assert values == {"NCCL_A": "1 # one\r", "NCCL_B": '"x"', "NCCL_C ": "3"}


def test_files_set_what_the_environment_lacks_and_the_first_wins(files, tmp_path):
    environ = files(
        "home/.nccl.conf", "#NCCL_ALGO=Ring\nNCCL_NET=IB\nNCCL_DEBUG=WARN\nno value here\n"
    )
    files("etc", "NCCL_NET=Socket\nNCCL_IB_TC=106\nNCCL_DEBUG=INFO\n")
    found = file_settings({**environ, "NCCL_DEBUG": "VERSION"})
    home, system = str(tmp_path / "home/.nccl.conf"), str(tmp_path / "etc")
    assert found == {"NCCL_NET": ("IB", home), "NCCL_IB_TC": ("106", system)}
    other = files("other", "NCCL_NET=Mine\n")
    assert (
        file_settings({**other, "NCCL_CONF_FILE": str(tmp_path / "other")})["NCCL_NET"][0] == "Mine"
    )


def test_a_forced_network_is_found_although_the_variable_is_set(files, tmp_path):
    """Holmes unsets the variable, and NCCL then sets it again from the file."""
    environ = files("etc", "NCCL_NET=IB\n")
    node = nccl_of_node({**environ, "NCCL_NET": "Socket"}, ())
    assert (node.forced_net, node.forced_in) == ("IB", str(tmp_path / "etc"))
    assert node.requested_net == "Socket"


def test_verbs_need_a_device_a_library_and_no_veto(files, tmp_path):
    environ, devices = files("etc", ""), tmp_path / "infiniband"
    devices.mkdir()
    assert "there is no" in why_no_verbs(environ, str(devices)) and "container" in why_no_verbs(
        environ, str(devices)
    )
    (devices / "uverbs0").write_text("")
    assert "libnone.so.1 cannot be loaded" in why_no_verbs(environ, str(devices), "libnone.so.1")
    assert why_no_verbs(environ, str(devices), "libc.so.6") == ""
    if os.geteuid():
        (devices / "uverbs0").chmod(0)
        assert "cannot be opened" in why_no_verbs(environ, str(devices), "libc.so.6")
    for value, vetoed in (("1", True), ("0", False), ("", False)):
        told = why_no_verbs({**environ, "NCCL_IB_DISABLE": value, "HOLMES_SYSFS": "/tree"})
        assert told == (f"NCCL_IB_DISABLE={value} is set" if vetoed else "")
    files("etc", "NCCL_IB_DISABLE=1\n")
    assert why_no_verbs(environ) == f"NCCL_IB_DISABLE=1 is set in {tmp_path / 'etc'}"


def test_a_node_without_fast_nics_says_nothing_of_verbs(files, monkeypatch):
    monkeypatch.setattr(net_plugin, "why_no_verbs", lambda environ: "none")
    environ = files("etc", "")
    assert (
        nccl_of_node(environ, ()).no_verbs == "" and nccl_of_node(environ, (IB,)).no_verbs == "none"
    )


def test_the_labs_own_plugin_is_what_answers_to_ib(files, tmp_path):
    labs, other = (tmp_path / f"libnccl-net-{name}.so" for name in ("holmes", "ofi"))
    for plugin, told in ((labs, ""), (other, str(other))):
        plugin.write_text("")
        environ = {**files("etc", ""), "NCCL_NET_PLUGIN": str(plugin)}
        assert nccl_of_node(environ, ()).plugin == told
