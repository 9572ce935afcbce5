"""Every check of the preflight, by group, in the order in which they are printed."""

from mindspeed_qerl.preflight import cann, config, files, host, network, npus, software, variables

CHECKS = {
    "NPUs": npus.ROWS,
    "host": [*host.ROWS, *network.ROWS, *variables.PRELOADED, *cann.ROWS],
    "environment": variables.ROWS,
    "versions": software.ROWS,
    "config": config.ROWS,
    "model": [*config.MODEL, *files.MODEL],
    "data": files.DATA,
    "checkpoints": files.CHECKPOINTS,
}
TABLE = [row for rows in CHECKS.values() for row in rows]
