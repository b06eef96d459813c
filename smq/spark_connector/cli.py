"""`smq spark-shell`: the command that the Spark extra adds to `smq`, through an entry point.

Owns its own options and error messages; the command line owns the options that name the cluster, and passes
`bootstrap`. It imports Spark only when it runs, and must never import the server.
"""

import importlib.util

import click

from smq import extra_advice


@click.command("spark-shell")
@click.option("--master", default="local[*]", show_default=True, help="Where Spark runs.")
@click.option("--conf", "settings", metavar="KEY=VALUE", multiple=True, help="A Spark setting; may be repeated.")
def spark_shell(bootstrap: str, master: str, settings: tuple[str, ...]) -> None:
    """Opens a Python shell with a Spark session on a running cluster.

    Commands may also be piped in: their output goes to standard output, and the exit code is 1 if one failed.

    Example: smq spark-shell --cluster-dir D
    """
    conf = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{setting!r} is not a setting: write KEY=VALUE")
        conf[key.strip()] = value.strip()
    for module in ("pyspark", "pyarrow", "pandas"):
        if importlib.util.find_spec(module) is None:
            raise click.ClickException(f"the Spark shell needs {module}: {extra_advice('spark')}")
    from smq.raft_state.errors import SmqError
    from smq.spark_connector.java import JavaNotFound
    from smq.spark_connector.shell import run_shell

    try:
        code = run_shell(bootstrap, master=master, conf=conf)
    except SmqError as e:
        message = f"{e}; start a node with `smq dev`, or name a running one with --bootstrap or --cluster-dir"
        raise click.ClickException(message) from e
    except JavaNotFound as e:
        raise click.ClickException(str(e)) from e
    raise SystemExit(code)
