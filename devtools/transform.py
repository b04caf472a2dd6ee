"""Print a SAM template as the plain CloudFormation that it becomes.

Run by the Python that has the SAM CLI: `.venv-aws/bin/python devtools/transform.py template.yaml`. No account, no
network. cfn-lint finds in the output what it misses in the source: a runtime that does not exist, a visibility timeout
below the function's.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")  # the translator asks for a region

from samcli.yamlhelper import yaml_parse  # type: ignore[import-not-found]  # not in the environment that is checked
from samtranslator.translator.transform import transform  # type: ignore[import-not-found]  # likewise


class NoManagedPolicies:
    """Stands in for the loader that would ask IAM, over the network."""

    def load(self) -> dict[str, str]:
        return {}


def expand(template: Path) -> Any:  # noqa: ANN401  whatever is in the template
    source = yaml_parse(template.read_text())
    for resource in source["Resources"].values():
        if resource["Type"] == "AWS::Serverless::Function":
            resource.setdefault("Properties", {})["CodeUri"] = "s3://bucket/key.zip"  # as `sam package` would leave it
    source.get("Globals", {}).get("Function", {}).pop("CodeUri", None)
    if "Transform" not in source:
        return source
    return transform(source, {}, NoManagedPolicies())


if __name__ == "__main__":
    print(json.dumps(expand(Path(sys.argv[1])), indent=1, default=str))
