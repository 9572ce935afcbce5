"""For `swift rlhf ... --external_plugins examples/grpo/ms_swift_plugin.py` (docs/integrations.md).

ms-swift puts a plugin's folder in front of Python's path: beside this file lies no module that has
the name of another package.
"""

import mindspeed_qerl.integrations.swift  # noqa: F401  it acts when it is imported
