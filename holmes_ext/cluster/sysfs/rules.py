"""The default rules: which net devices a training job should leave alone, each with its reason in one line.

A rule sets a NIC aside (`Nic.skipped`); naming it in `include` overrules that. What a NIC is cabled to
(storage) cannot be known from /sys: `exclude` is for what names do not say.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from holmes_ext.cluster.sysfs.net import NetDevice, physical_below

# Names that administrators and systems give to NICs that are not for training traffic
NAMES = {
    "storage (by its name)": ("*storage*", "stor[0-9]*", "san[0-9]*", "iscsi*", "nfs[0-9]*"),
    "management (by its name)": ("idrac*", "ilo[0-9]*", "bmc*", "ipmi*", "mgmt*", "usb[0-9]*"),
    "container network (by its name)": ("docker*", "cali*", "cilium_*", "lxc*", "virbr*", "cni[0-9]*"),
}
_USB_DRIVERS = ("cdc_ether", "cdc_ncm", "cdc_subset", "rndis_host", "cdc_eem")


def reason_by_name(*names: str) -> str:
    """The reason to set aside a NIC that has one of these names, "" when there is none."""
    for reason, patterns in NAMES.items():
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return reason
    return ""


def reason_to_skip(device: NetDevice, devices: dict[str, NetDevice], has_address: bool | None) -> str:
    """Why an Ethernet device is set aside, "" when it is not. `has_address`: None when unknown."""
    master = devices.get(device.master)
    if device.usb or device.driver in _USB_DRIVERS:  # a baseboard controller's link to the host
        return "management (USB/BMC)"
    if device.wireless:
        return "wireless"
    if device.representor:  # the switch's side of a virtual function
        return "representor of a virtual function"
    if device.master and (master is None or master.what != "vrf"):  # sockets belong on the bond or bridge
        return f"member of {device.master}"
    named = reason_by_name(device.name)
    if named:
        return named
    if device.what in ("bond", "team", "vlan", "bridge"):
        # over a physical NIC it is that NIC's face; without one it joins containers of this node (docker0)
        return "" if physical_below(device, devices) else f"{device.what} without a physical NIC"
    if device.what in ("veth", "macvlan"):
        # a container's NIC has an address; the host's end of a container's cable has none
        return f"{device.what} without an address" if has_address is False else ""
    return "" if device.what == "physical" else "virtual device"
