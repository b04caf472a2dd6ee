"""LocalStack's way to run a function, without Docker: as a process of this machine, in `devtools.runtime`.

Imported by LocalStack 4.14 in its own virtual environment, and by nothing else; `devtools.rehearsal` starts it. What
REHEARSAL_VARIABLES holds, as JSON, every function gets beside the variables of its own. Each invocation is a line in
the file REHEARSAL_INVOCATIONS.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

# LocalStack is not in the environment that is checked.
from localstack.services.lambda_.invocation.lambda_models import (  # type: ignore[import-not-found]  # as said
    InvocationResult,
)
from localstack.services.lambda_.invocation.plugins import (  # type: ignore[import-not-found]  # as said
    RuntimeExecutorPlugin,
)
from localstack.services.lambda_.invocation.runtime_executor import (  # type: ignore[import-not-found]  # as said
    RuntimeExecutor,
)

from devtools.runtime import ExecutionEnvironment, Exited, Raised, Returned, TimedOut


class ProcessExecutor(RuntimeExecutor):  # type: ignore[misc]  # its base is unknown here
    def start(self, env_vars: dict[str, str]) -> None:
        config = self.function_version.config
        self._environment = ExecutionEnvironment(
            Path(config.code.get_unzipped_code_location()),
            environment={name: str(value) for name, value in env_vars.items()}
            | json.loads(os.environ["REHEARSAL_VARIABLES"]),
            handler=config.handler,
            timeout=config.timeout,
        )
        self._environment.__enter__()

    def stop(self) -> None:
        self._environment.__exit__()

    def invoke(self, payload: dict[str, Any]) -> InvocationResult:
        event = json.loads(payload["payload"])
        began = time.time()
        result = self._environment.invoke(event)
        match result:
            case Returned(answer):
                said, failed = answer, False
            case Raised(kind, message, trace):
                said, failed = {"errorMessage": message, "errorType": kind, "stackTrace": trace}, True
            case TimedOut(words):
                said, failed = {"errorType": "Sandbox.Timedout", "errorMessage": words}, True
            case Exited(words):
                said, failed = {"errorType": "Runtime.ExitError", "errorMessage": words}, True
        line = {"function": self.function_version.id.function_name, "at": began, "event": event, "said": said}
        with Path(os.environ["REHEARSAL_INVOCATIONS"]).open("a") as invocations:
            invocations.write(json.dumps(line) + "\n")
        return InvocationResult(
            request_id=payload["invoke-id"], payload=json.dumps(said).encode(), is_error=failed, logs=""
        )

    def get_logs(self) -> str:
        return self._environment.log

    def get_address(self) -> str:
        return "127.0.0.1"

    def get_endpoint_from_executor(self) -> str:
        return "localhost"

    def get_runtime_endpoint(self) -> str:
        return f"http://127.0.0.1:1/{self.id}"  # where AWS's own init would report; ours is asked instead

    @classmethod
    def prepare_version(cls, function_version: Any) -> None:  # noqa: ANN401  LocalStack's
        if function_version.config.code:
            function_version.config.code.prepare_for_execution()

    @classmethod
    def cleanup_version(cls, function_version: Any) -> None:  # noqa: ANN401  LocalStack's
        pass


class ProcessExecutorPlugin(RuntimeExecutorPlugin):  # type: ignore[misc]  # as above
    name = "process"

    def load(self, *_: object, **__: object) -> type[ProcessExecutor]:
        return ProcessExecutor
