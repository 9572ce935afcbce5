"""CANN's acl for Python, as far as a count of devices needs it. The box adds COUNT, ERROR and SOC."""
# ruff: noqa: F821


class rt:
    @staticmethod
    def get_device_count():
        return (0, ERROR) if ERROR else (COUNT, 0)


def init(path=None):
    return ERROR


def get_soc_name():
    return SOC
