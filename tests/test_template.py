"""What is deployed: the numbers that must agree, who may do what, what is watched; and the linters' word on it.

The template is read as it is written. `!Ref x` becomes {"Ref": "x"}, as CloudFormation understands it.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from core import secret
from core.schema import MIGRATIONS
from core.settings import LEASE_MARGIN_SECONDS, Settings
from devtools.simulated_apns import Credentials, Reject
from handlers import deploy
from tests.support.handler import ROOT, Stack

pytest_plugins = ["tests.support.handler_fixtures"]

TOOLS, CHECKOV = ROOT / ".venv-aws" / "bin", ROOT / ".venv-checkov" / "bin"
TEMPLATES = ["template.yaml", "quickstart.yaml"]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it ships no types
    pass


def _short_form(loader: Any, suffix: str, node: Any) -> dict[str, Any]:  # noqa: ANN401  yaml's own
    match node:
        case yaml.ScalarNode():
            value: Any = loader.construct_scalar(node)
            if suffix == "GetAtt":
                value = value.split(".", 1)
        case yaml.SequenceNode():
            value = loader.construct_sequence(node, deep=True)
        case _:
            value = loader.construct_mapping(node, deep=True)
    return {suffix if suffix in {"Ref", "Condition"} else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _short_form)


def load(name: str) -> dict[str, Any]:
    loaded = yaml.load((ROOT / name).read_text(encoding="utf-8"), _Loader)  # noqa: S506  a safe loader, and our file
    assert isinstance(loaded, dict)
    return loaded


TEMPLATE = load("template.yaml")
RESOURCES: dict[str, Any] = TEMPLATE["Resources"]
PARAMETERS: dict[str, Any] = TEMPLATE["Parameters"]
DRAIN = RESOURCES["DrainFunction"]["Properties"]
MIGRATE = RESOURCES["MigrateFunction"]["Properties"]
FUNCTIONS = {name: found for name, found in RESOURCES.items() if found["Type"] == "AWS::Serverless::Function"}
ALARMS = {name: found for name, found in RESOURCES.items() if found["Type"] == "AWS::CloudWatch::Alarm"}


def att(resource: str, attribute: str = "Arn") -> dict[str, Any]:
    return {"Fn::GetAtt": [resource, attribute]}


def ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def walk(node: object) -> Iterator[object]:
    yield node
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from walk(below)


def the_only(kind: str) -> dict[str, Any]:
    (found,) = (resource for resource in RESOURCES.values() if resource["Type"] == kind)
    assert isinstance(found, dict)
    return found


# The tick.


def test_one_rule_fires_every_minute_at_the_function_and_at_the_queue_whose_delay_is_half_of_it() -> None:
    rule = the_only("AWS::Events::Rule")["Properties"]

    assert rule["ScheduleExpression"] == "rate(1 minute)"
    assert [target["Arn"] for target in rule["Targets"]] == [att("DrainFunction"), att("HalfTicks")]
    assert RESOURCES["HalfTicks"]["Properties"]["DelaySeconds"] == 30
    assert DRAIN["Events"]["HalfTick"]["Properties"]["Queue"] == att("HalfTicks")


def test_the_rule_is_let_in_where_its_targets_are_and_by_their_own_policies() -> None:
    """A role on such a target can make delivery fail, and nothing lints a policy that is missing."""
    rule = att("Tick")
    permission = the_only("AWS::Lambda::Permission")["Properties"]
    policy = the_only("AWS::SQS::QueuePolicy")["Properties"]
    (statement,) = policy["PolicyDocument"]["Statement"]

    assert not [target for target in RESOURCES["Tick"]["Properties"]["Targets"] if "RoleArn" in target]
    assert permission == {
        "FunctionName": ref("DrainFunction"),
        "Action": "lambda:InvokeFunction",
        "Principal": "events.amazonaws.com",
        "SourceArn": rule,
    }
    assert policy["Queues"] == [ref("HalfTicks"), ref("DeadTicks")]
    assert statement == {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": [att("HalfTicks"), att("DeadTicks")],
        "Condition": {"ArnEquals": {"aws:SourceArn": rule}},
    }


def test_a_tick_is_given_up_after_three_tries_whichever_way_it_came_and_ends_in_the_dead_letter_queue() -> None:
    invoke = DRAIN["EventInvokeConfig"]
    redrive = RESOURCES["HalfTicks"]["Properties"]["RedrivePolicy"]

    assert invoke["MaximumRetryAttempts"] + 1 == 3
    assert invoke["DestinationConfig"]["OnFailure"] == {"Type": "SQS", "Destination": att("DeadTicks")}
    assert redrive == {"deadLetterTargetArn": att("DeadTicks"), "maxReceiveCount": 3}
    for target in RESOURCES["Tick"]["Properties"]["Targets"]:
        assert target["RetryPolicy"]["MaximumRetryAttempts"] + 1 == 3
        assert target["DeadLetterConfig"] == {"Arn": att("DeadTicks")}


def test_a_stale_tick_is_not_kept_but_its_tries_have_the_time_they_need() -> None:
    for target in RESOURCES["Tick"]["Properties"]["Targets"]:
        assert target["RetryPolicy"]["MaximumEventAgeInSeconds"] == 60
    # Lambda waits one minute before the second try and two before the third.
    assert DRAIN["EventInvokeConfig"]["MaximumEventAgeInSeconds"] >= 60 + 120 + 2 * DRAIN["Timeout"]


def test_at_most_two_ticks_overlap_and_no_drain_outlives_its_lease() -> None:
    lease = int(DRAIN["Environment"]["Variables"]["LEASE_SECONDS"])

    assert DRAIN["Timeout"] < 30
    assert DRAIN["Timeout"] + LEASE_MARGIN_SECONDS < lease
    assert lease == Settings.from_env({"DATABASE_URL": "postgresql://localhost/app"}).lease_seconds


def test_the_queue_hides_a_message_for_six_timeouts_and_keeps_it_until_all_its_tries_are_over() -> None:
    queue = RESOURCES["HalfTicks"]["Properties"]
    tries = queue["RedrivePolicy"]["maxReceiveCount"]

    assert queue["VisibilityTimeout"] >= 6 * DRAIN["Timeout"]
    assert queue["MessageRetentionPeriod"] > queue["DelaySeconds"] + tries * queue["VisibilityTimeout"]
    assert RESOURCES["DeadTicks"]["Properties"]["MessageRetentionPeriod"] > queue["MessageRetentionPeriod"]


def test_concurrency_is_reserved_for_whatever_may_run_at_once() -> None:
    """Else messages of the queue are throttled, and burn their receives without a run."""
    mapping = DRAIN["Events"]["HalfTick"]["Properties"]

    assert mapping["ScalingConfig"]["MaximumConcurrency"] >= 2  # less is refused
    assert {"Fn::If": ["Reserve", mapping["ScalingConfig"]["MaximumConcurrency"] + 1, ref("AWS::NoValue")]} == DRAIN[
        "ReservedConcurrentExecutions"
    ]
    assert PARAMETERS["ReserveConcurrency"]["Default"] == "true"


def test_the_queues_are_encrypted() -> None:
    queues = [found["Properties"] for found in RESOURCES.values() if found["Type"] == "AWS::SQS::Queue"]

    assert len(queues) == 2
    assert all(queue["SqsManagedSseEnabled"] for queue in queues)


# The functions.


def test_the_functions_run_on_what_is_tested() -> None:
    shared = TEMPLATE["Globals"]["Function"]

    assert shared["Runtime"] == "python3.13"
    assert shared["CodeUri"] == "src/"
    assert shared["Architectures"] == [ref("Architecture")]
    assert PARAMETERS["Architecture"]["Default"] == "arm64"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_has_a_handler_that_exists_a_role_and_a_log_group_of_its_own(name: str) -> None:
    module, _, function = FUNCTIONS[name]["Properties"]["Handler"].rpartition(".")
    source = (ROOT / "src" / f"{module.replace('.', '/')}.py").read_text()

    assert re.search(rf"^def {function}\(", source, re.MULTILINE)
    for of_its_own, kind in (("Role", "AWS::IAM::Role"), ("LoggingConfig", "AWS::Logs::LogGroup")):
        mine = json.dumps(FUNCTIONS[name]["Properties"][of_its_own])
        others = [json.dumps(other["Properties"][of_its_own]) for key, other in FUNCTIONS.items() if key != name]
        (named,) = (resource for resource in RESOURCES if f'"{resource}"' in mine)
        assert RESOURCES[named]["Type"] == kind
        assert mine not in others


def test_every_log_group_ends_its_lines_some_day() -> None:
    groups = [found["Properties"] for found in RESOURCES.values() if found["Type"] == "AWS::Logs::LogGroup"]

    assert len(groups) == len(FUNCTIONS)
    assert all(group["RetentionInDays"] == ref("LogRetentionDays") for group in groups)


def environment(function: dict[str, Any]) -> dict[str, Any]:
    return {**TEMPLATE["Globals"]["Function"]["Environment"]["Variables"], **function["Environment"]["Variables"]}


# What settings.py reads, and what the handlers themselves do.
KNOWN = {
    *re.findall(r'"([A-Z][A-Z_]+)"', (ROOT / "src/core/settings.py").read_text()),
    *re.findall(r'environ\.get\("([A-Z_]+)"', Path(str(deploy.__file__)).read_text()),
    "POWERTOOLS_SERVICE_NAME",
    "AWS_ENDPOINT_URL",  # botocore does
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_variable_is_set_that_nobody_reads_and_none_holds_a_secret(name: str) -> None:
    variables = environment(FUNCTIONS[name]["Properties"])

    assert variables.keys() - KNOWN == set()
    # An ARN of a secret at most: no parameter is a password, and no value is resolved from a secret.
    assert "resolve:" not in json.dumps(variables)
    assert not [parameter for parameter in PARAMETERS.values() if parameter.get("NoEcho")]


@pytest.mark.parametrize("secret", ["", "arn:aws:secretsmanager:eu-west-1:123456789012:secret:db-AbCdEf"])
@pytest.mark.parametrize("function", [DRAIN, MIGRATE], ids=["drain", "migrate"])
def test_the_functions_take_the_environment_that_they_are_given(function: dict[str, Any], secret: str) -> None:
    """Whichever way of logging in was chosen, with every parameter that may be left out left out."""

    def resolved(value: Any) -> str:  # noqa: ANN401  whatever a template holds
        match value:
            case {"Ref": "DatabaseSecretArn" | "MigrationSecretArn"}:
                return secret
            case {"Ref": str(name)}:
                return str(PARAMETERS.get(name, {}).get("Default", "some.name"))
            case {"Fn::If": ["DrainHasSecret" | "MigrationHasSecret", yes, no]}:
                return str(yes if secret else no)
            case {"Fn::If": ["CreateApnsSecret", yes, _]}:
                return resolved(yes)
            case {"Fn::If": ["MigrationHasHost", _, no]}:
                return resolved(no)
            case _:
                assert isinstance(value, str)
                return value

    settings = Settings.from_env({name: resolved(value) for name, value in environment(function).items()})

    assert type(settings.database).__name__ == ("RdsSecret" if secret else "RdsIam")


def test_the_functions_live_in_the_vpc_and_reach_the_database_https_and_nothing_else() -> None:
    group = RESOURCES["FunctionSecurityGroup"]["Properties"]
    ingress = the_only("AWS::EC2::SecurityGroupIngress")["Properties"]
    port = ref("DatabasePort")

    assert TEMPLATE["Globals"]["Function"]["VpcConfig"] == {
        "SubnetIds": ref("SubnetIds"),
        "SecurityGroupIds": [ref("FunctionSecurityGroup")],
    }
    assert "SecurityGroupIngress" not in group
    assert [
        (rule["FromPort"], rule["ToPort"], rule.get("CidrIp") or rule["DestinationSecurityGroupId"])
        for rule in group["SecurityGroupEgress"]
    ] == [(443, 443, "0.0.0.0/0"), (port, port, ref("DatabaseSecurityGroupId"))]
    assert ingress["GroupId"] == ref("DatabaseSecurityGroupId")
    assert ingress["SourceSecurityGroupId"] == ref("FunctionSecurityGroup")
    assert (ingress["FromPort"], ingress["ToPort"]) == (port, port)


# Who may do what.


def statements(role: str) -> list[dict[str, Any]]:
    """Give what a role of ours may do, with each condition's statement as if it held."""
    found = [
        statement["Fn::If"][1] if "Fn::If" in statement else statement
        for policy in RESOURCES[role]["Properties"]["Policies"]
        for statement in policy["PolicyDocument"]["Statement"]
    ]
    assert RESOURCES[role]["Properties"]["ManagedPolicyArns"] == [ref("NetworkPolicy")]
    return found


def allowed(role: str) -> dict[str, list[Any]]:
    may: dict[str, list[Any]] = {}
    for statement in statements(role):
        assert statement["Effect"] == "Allow"
        for action in [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]:
            may.setdefault(action, []).append(statement["Resource"])
    return may


DBUSER = "arn:${AWS::Partition}:rds-db:${AWS::Region}:${AWS::AccountId}:dbuser:"


def test_the_drain_may_do_what_it_needs_with_what_it_needs_it_for_and_nothing_else() -> None:
    assert allowed("DrainRole") == {
        "logs:CreateLogStream": [att("DrainLogs")],
        "logs:PutLogEvents": [att("DrainLogs")],
        "sqs:ReceiveMessage": [att("HalfTicks")],
        "sqs:DeleteMessage": [att("HalfTicks")],
        "sqs:GetQueueAttributes": [att("HalfTicks")],
        "sqs:SendMessage": [att("DeadTicks")],
        "secretsmanager:GetSecretValue": [
            {"Fn::If": ["CreateApnsSecret", ref("ApnsSecret"), ref("ApnsSecretArn")]},
            ref("DatabaseSecretArn"),
        ],
        "kms:Decrypt": [ref("SecretsKmsKeyArn")],
        "rds-db:connect": [{"Fn::Sub": DBUSER + "${DatabaseResourceId}/${DatabaseUser}"}],
    }


def test_the_migrations_may_do_even_less_and_not_read_the_signing_key() -> None:
    assert allowed("MigrateRole") == {
        "logs:CreateLogStream": [att("MigrateLogs")],
        "logs:PutLogEvents": [att("MigrateLogs")],
        "secretsmanager:GetSecretValue": [ref("MigrationSecretArn")],
        "kms:Decrypt": [ref("SecretsKmsKeyArn")],
        "rds-db:connect": [
            {
                "Fn::Sub": [
                    DBUSER + "${Id}/${MigrationUser}",
                    {
                        "Id": {
                            "Fn::If": ["MigrationHasResourceId", ref("MigrationResourceId"), ref("DatabaseResourceId")]
                        }
                    },
                ]
            }
        ],
    }


def test_what_cannot_be_named_is_lambdas_network_alone_and_denied_to_the_functions_code() -> None:
    allow, describe, deny = RESOURCES["NetworkPolicy"]["Properties"]["PolicyDocument"]["Statement"]

    assert [allow["Effect"], describe["Effect"], deny["Effect"]] == ["Allow", "Allow", "Deny"]
    assert all(action.startswith("ec2:Describe") for action in describe["Action"])
    assert sorted(deny["Action"]) == sorted(allow["Action"] + describe["Action"])
    # The key is there, that is: it is not null.
    assert deny["Condition"] == {"Null": {"lambda:SourceFunctionArn": "false"}}
    everywhere = [
        name
        for name, found in RESOURCES.items()
        for node in walk(found)
        if isinstance(node, dict) and node.get("Effect") == "Allow" and "*" in json.dumps(node.get("Resource"))
    ]
    assert set(everywhere) == {"NetworkPolicy"}
    assert not re.search(r'"[a-z0-9-]+:\*"', json.dumps(RESOURCES))  # no action of a whole service


def test_a_role_is_for_lambda_alone() -> None:
    roles = [found["Properties"] for found in RESOURCES.values() if found["Type"] == "AWS::IAM::Role"]

    assert len(roles) == len(FUNCTIONS)
    for role in roles:
        (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
        assert statement["Principal"] == {"Service": "lambda.amazonaws.com"}


# The signing key, the schema.


def test_the_signing_keys_secret_begins_as_unconfigured_outlives_the_stack_and_never_changes() -> None:
    """Whatever is changed here, CloudFormation updates the secret; its value, once somebody filled it, is not ours.

    So this is the resource as it was first released, property by property. Do not change it: name a secret instead.
    """
    secret = dict(RESOURCES["ApnsSecret"])
    secret.pop("Metadata")

    assert secret == {
        "Type": "AWS::SecretsManager::Secret",
        "Condition": "CreateApnsSecret",
        "DeletionPolicy": "RetainExceptOnCreate",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "Description": 'The APNs signing key: {"team_id", "key_id", "private_key", "topic"}',
            "SecretString": "{}",
        },
    }


def test_the_deploy_asks_for_the_migrations_again_when_there_is_a_new_one_or_another_database() -> None:
    schema = RESOURCES["Schema"]
    newest = max(path.name for path in MIGRATIONS.glob("*.sql"))

    assert schema["Properties"]["ServiceToken"] == att("MigrateFunction")
    assert schema["Properties"]["Migrations"] == newest, f"set Migrations to {newest} in template.yaml"
    assert schema["Properties"]["Host"] == environment(MIGRATE)["DB_HOST"]
    assert schema["Properties"]["Port"] == environment(MIGRATE)["DB_PORT"]
    assert schema["Properties"]["Name"] == environment(MIGRATE)["DB_NAME"]
    assert schema["Properties"]["DrainUser"] == environment(MIGRATE)["DRAIN_DB_USER"] == environment(DRAIN)["DB_USER"]
    assert schema["Properties"]["DrainAuth"] == environment(MIGRATE)["DRAIN_DB_AUTH"] == environment(DRAIN)["DB_AUTH"]


def test_new_code_of_the_drain_waits_for_the_migrations_and_they_for_the_way_to_the_database() -> None:
    assert RESOURCES["DrainFunction"]["DependsOn"] == "Schema"
    assert RESOURCES["Schema"]["DependsOn"] == "DatabaseAdmitsFunctions"


def test_a_deploy_does_not_hang_on_its_migrations() -> None:
    """The function answers before it is killed. Should it not even run, CloudFormation's own wait is short."""
    assert deploy.ANSWER_SECONDS < MIGRATE["Timeout"] <= 900
    assert MIGRATE["Timeout"] < RESOURCES["Schema"]["Properties"]["ServiceTimeout"] <= 1000


def test_deleting_the_stack_leaves_the_tables_alone() -> None:
    assert RESOURCES["Schema"]["DeletionPolicy"] == RESOURCES["Schema"]["UpdateReplacePolicy"] == "Retain"


# Two stacks, and what they are told.


def test_two_stacks_do_not_collide() -> None:
    """What is named is named after the stack; all else CloudFormation names."""
    named = {
        name: value
        for name, found in RESOURCES.items()
        for key, value in found["Properties"].items()
        if re.fullmatch(r"(Function|Queue|Rule|Role|Alarm|Dashboard|LogGroup|ManagedPolicy|Group|Schedule)?Name", key)
        and found["Type"] != "AWS::Lambda::Permission"
        and name != "Schema"
    }

    assert named == {"Dashboard": {"Fn::Sub": "${AWS::StackName}-${AWS::Region}"}}
    assert environment(DRAIN)["POWERTOOLS_SERVICE_NAME"] == ref("AWS::StackName")
    assert not [output for output in TEMPLATE["Outputs"].values() if "Export" in output]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_says_what_it_is_and_what_is_wrong_with_a_value(name: str) -> None:
    parameter = PARAMETERS[name]
    checked = parameter["Type"].startswith(("AWS::", "List<AWS::")) or parameter["Type"] == "Number"

    assert len(parameter["Description"]) > 10
    assert checked or "AllowedValues" in parameter or {"AllowedPattern", "ConstraintDescription"} <= parameter.keys()
    shown = [entry for group in TEMPLATE["Metadata"]["AWS::CloudFormation::Interface"]["ParameterGroups"]
             for entry in group["Parameters"]]  # fmt: skip
    assert shown.count(name) == 1


ACCOUNT = "eu-west-1:123456789012"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "DatabaseHost",
            ["db.c9akciq32rgp.eu-west-1.rds.amazonaws.com", "p.proxy-c9akciq32rgp.eu-west-1.rds.amazonaws.com"],
            ["", "db", "db.example.com:5432", "postgresql://db.example.com", "user@db.example.com"],
        ),
        ("DatabaseName", ["app", "my-app_2"], ["", "a b", 'a"b', "a" * 64]),
        ("DatabaseUser", ["apns_drain", "postgres"], ["", "Drain", "a-b", 'a"', "1a"]),
        ("DatabaseResourceId", ["", "db-ABCDEFGHIJKL", "prx-0a1b2c3d", "cluster-ABC"], ["my-database", "*", "db-*"]),
        (
            "DatabaseSecretArn",
            [
                "",
                f"arn:aws:secretsmanager:{ACCOUNT}:secret:rds!db-0a1b-AbCdEf",
                f"arn:aws-us-gov:secretsmanager:{ACCOUNT}:secret:a/b-AbCdEf",
            ],
            ["my-secret", f"arn:aws:secretsmanager:{ACCOUNT}:secret:*", f"arn:aws:ssm:{ACCOUNT}:parameter/a"],
        ),
        (
            "SecretsKmsKeyArn",
            ["", f"arn:aws:kms:{ACCOUNT}:key/0a1b-2c"],
            ["alias/mine", f"arn:aws:kms:{ACCOUNT}:alias/mine", f"arn:aws:kms:{ACCOUNT}:key/*"],
        ),
        ("AlarmTopicArn", ["", f"arn:aws:sns:{ACCOUNT}:oncall"], ["oncall", "me@example.com"]),
    ],
)
def test_a_pattern_takes_what_is_right_and_refuses_what_people_paste(
    name: str, good: list[str], bad: list[str]
) -> None:
    pattern = PARAMETERS[name]["AllowedPattern"]

    assert [value for value in good if not re.fullmatch(pattern, value)] == []
    assert [value for value in bad if re.fullmatch(pattern, value)] == []


def test_the_bounds_of_a_parameter_are_those_of_the_setting() -> None:
    for parameter, variable in (("DrainBatchSize", "DRAIN_BATCH_SIZE"), ("DrainMaxBatches", "DRAIN_MAX_BATCHES")):
        declared = PARAMETERS[parameter]
        source = (ROOT / "src/core/settings.py").read_text()
        (bounds,) = re.findall(rf'whole\("{variable}", (\d+), (\d+), (\d+)\)', source)
        assert tuple(map(int, bounds)) == (declared["Default"], declared["MinValue"], declared["MaxValue"])
        assert DRAIN["Environment"]["Variables"][variable] == ref(parameter)


def test_every_condition_and_every_parameter_is_used() -> None:
    body = json.dumps({key: TEMPLATE[key] for key in ("Globals", "Resources", "Outputs", "Conditions")})

    unused = [name for name in TEMPLATE["Conditions"] if f'"{name}"' not in json.dumps(RESOURCES | TEMPLATE["Outputs"])]
    unused += [name for name in PARAMETERS if f'"{name}"' not in body and f"${{{name}}}" not in body]
    assert unused == []


def test_no_template_uses_yaml_aliases_which_cloudformation_does_not_read() -> None:
    for name in TEMPLATES:
        tokens = yaml.scan((ROOT / name).read_text(encoding="utf-8"))
        assert not [token for token in tokens if isinstance(token, yaml.AliasToken | yaml.AnchorToken)]


# What is watched.


@pytest.fixture
def emitted(stack: Stack) -> set[tuple[str, frozenset[str]]]:
    """Drain, with a delivery that is refused for our fault, and see which metrics are written, by which dimensions."""
    stack.post(Reject(403, "InvalidProviderToken"))
    stack.drain()
    return {
        (metric["Name"], frozenset(dimensions))
        for line in stack.metrics()
        for directive in line["_aws"]["CloudWatchMetrics"]
        for metric in directive["Metrics"]
        for dimensions in directive["Dimensions"]
        if directive["Namespace"] == "ApnsOutbox"
    }


def dashboard() -> dict[str, Any]:
    body = RESOURCES["Dashboard"]["Properties"]["DashboardBody"]["Fn::Sub"]
    parsed = json.loads(re.sub(r"\$\{([A-Za-z:.]+)\}", r"\1", body))
    assert isinstance(parsed, dict)
    return parsed


def shown() -> list[list[Any]]:
    return [
        [part for part in metric if isinstance(part, str)]
        for widget in dashboard()["widgets"]
        for metric in widget["properties"].get("metrics", [])
        if isinstance(metric[0], str)
    ]


def test_every_metric_of_ours_that_an_alarm_or_the_dashboard_looks_at_is_written_by_the_drain(
    emitted: set[tuple[str, frozenset[str]]],
) -> None:
    watched = {
        (alarm["Properties"]["MetricName"], frozenset(each["Name"] for each in alarm["Properties"]["Dimensions"]))
        for alarm in ALARMS.values()
        if alarm["Properties"]["Namespace"] == "ApnsOutbox"
    }
    watched |= {(name, frozenset(rest[::2])) for space, name, *rest in shown() if space == "ApnsOutbox"}

    assert len(watched) >= 15
    assert watched - emitted == set()
    # What the search on the dashboard looks for.
    assert ("ProviderFault", frozenset({"service", "reason"})) in emitted
    assert 'SEARCH(\'{ApnsOutbox,reason,service} MetricName=\\"ProviderFault\\"' in json.dumps(dashboard())


def test_every_metric_that_the_drain_writes_is_on_the_dashboard(emitted: set[tuple[str, frozenset[str]]]) -> None:
    body = json.dumps(dashboard())

    assert {name for name, _ in emitted if f'"{name}"' not in body} == set()


def test_the_service_that_metrics_and_logs_carry_is_the_stacks_own() -> None:
    """As the template sets it: else two stacks in one account would add up in one metric, and alarm for each other."""
    program = (
        "from handlers import drain\n"
        "drain.metrics.add_metric(name='Sent', unit='Count', value=1)\n"
        "drain.metrics.flush_metrics()\n"
        "drain.logger.info('x')\n"
    )
    environ = {"PYTHONPATH": str(ROOT / "src"), "POWERTOOLS_SERVICE_NAME": "apns-outbox-staging"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True, timeout=60
    )

    assert [json.loads(line)["service"] for line in ran.stdout.splitlines()] == ["apns-outbox-staging"] * 2
    for alarm in ALARMS.values():
        if alarm["Properties"]["Namespace"] == "ApnsOutbox":
            assert alarm["Properties"]["Dimensions"] == [{"Name": "service", "Value": ref("AWS::StackName")}]


def test_there_is_an_alarm_for_each_thing_that_wakes_somebody() -> None:
    assert {(alarm["Properties"]["Namespace"], alarm["Properties"]["MetricName"]) for alarm in ALARMS.values()} == {
        ("ApnsOutbox", "OldestDueAgeSeconds"),
        ("ApnsOutbox", "Failed"),
        ("ApnsOutbox", "ProviderFault"),
        ("ApnsOutbox", "Outage"),
        ("AWS/Lambda", "Errors"),
        ("AWS/Lambda", "Throttles"),
        ("AWS/Lambda", "Duration"),
        ("AWS/SQS", "ApproximateNumberOfMessagesVisible"),
        ("AWS/SQS", "ApproximateAgeOfOldestMessage"),
        ("AWS/Events", "FailedInvocations"),
    }


def test_only_the_dead_mans_switch_takes_silence_for_an_alarm() -> None:
    """A drain that does not run writes nothing: so does one that has nothing to complain of, in every other metric."""
    missing = {name: alarm["Properties"]["TreatMissingData"] for name, alarm in ALARMS.items()}

    assert missing.pop("OldestDueAgeAlarm") == "breaching"
    assert set(missing.values()) == {"notBreaching"}


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_says_what_to_do_and_tells_the_topic_when_it_begins_and_ends(name: str) -> None:
    alarm = ALARMS[name]["Properties"]
    topic = [{"Fn::If": ["TellSomebody", ref("AlarmTopicArn"), ref("AWS::NoValue")]}]

    assert len(alarm["AlarmDescription"]) > 40
    assert alarm["AlarmActions"] == alarm["OKActions"] == topic
    assert alarm.get("DatapointsToAlarm", 1) <= alarm["EvaluationPeriods"]


def test_the_numbers_of_the_alarms_are_those_of_the_function() -> None:
    duration, age = ALARMS["DurationAlarm"]["Properties"], ALARMS["OldestDueAgeAlarm"]["Properties"]
    marks = {
        mark["label"]: mark["value"]
        for widget in dashboard()["widgets"]
        for mark in widget["properties"].get("annotations", {}).get("horizontal", [])
    }

    assert duration["Threshold"] == 0.8 * DRAIN["Timeout"] * 1000
    assert f"timeout of {DRAIN['Timeout']} s" in duration["AlarmDescription"]
    assert marks == {"timeout": DRAIN["Timeout"] * 1000, "alarm": age["Threshold"]}
    assert age["Threshold"] > 2 * 30  # two ticks that were lost are no alarm


def test_the_dashboard_shows_every_alarm_and_names_nothing_that_is_not_there() -> None:
    body = RESOURCES["Dashboard"]["Properties"]["DashboardBody"]["Fn::Sub"]
    names = set(re.findall(r"\$\{([A-Za-z]+)(?:\.[A-Za-z]+)?\}", body))
    (alarms,) = (widget["properties"]["alarms"] for widget in dashboard()["widgets"] if widget["type"] == "alarm")

    assert names <= RESOURCES.keys()
    assert set(alarms) == {f"{name}.Arn" for name in ALARMS}


def test_no_widget_lies_upon_another() -> None:
    taken: set[tuple[int, int]] = set()
    for widget in dashboard()["widgets"]:
        cells = {
            (x, y)
            for x in range(widget["x"], widget["x"] + widget["width"])
            for y in range(widget["y"], widget["y"] + widget["height"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_log_queries_look_for_lines_that_the_drain_writes() -> None:
    source = (ROOT / "src/handlers/drain.py").read_text()
    queries = [w["properties"]["query"] for w in dashboard()["widgets"] if w["type"] == "log"]
    messages = [found for query in queries for found in re.findall(r"message = '([^']+)'", query)]

    assert sorted(messages) == ["delivery failed", "drain ended early"]
    assert all(f'"{message}"' in source for message in messages)
    assert '"withheld:' in source
    assert all(query.startswith("SOURCE 'DrainLogs' |") for query in queries)


# The quick start.


def test_the_quick_starts_database_is_private_encrypted_and_knows_no_password_of_ours() -> None:
    database = load("quickstart.yaml")["Resources"]["Database"]

    assert database["Properties"]["PubliclyAccessible"] is False
    assert database["Properties"]["StorageEncrypted"] is True
    assert database["Properties"]["EnableIAMDatabaseAuthentication"] is True
    assert database["Properties"]["ManageMasterUserPassword"] is True
    assert "MasterUserPassword" not in database["Properties"]
    assert database["DeletionPolicy"] == database["UpdateReplacePolicy"] == "Snapshot"


def test_the_quick_start_ends_with_what_the_application_has_to_be_told() -> None:
    quickstart = load("quickstart.yaml")
    told = dict(pair.split("=", 1) for pair in quickstart["Outputs"]["Parameters"]["Value"]["Fn::Sub"].split())
    needed = {name for name, parameter in PARAMETERS.items() if "Default" not in parameter}

    assert needed <= told.keys() <= PARAMETERS.keys()
    assert told["DatabaseName"] == quickstart["Resources"]["Database"]["Properties"]["DBName"]
    for value in told.values():
        assert {name.split(".")[0] for name in re.findall(r"\$\{([^}]+)\}", value)} <= quickstart["Resources"].keys()


def test_the_quick_starts_price_is_the_sum_of_its_parts() -> None:
    head = (ROOT / "quickstart.yaml").read_text().partition("Parameters:")[0]
    *parts, total = [float(line) for line in re.findall(r"^# .*?(\d+\.\d\d)(?:  |$)", head, re.MULTILINE)]

    assert round(sum(parts), 2) == total
    assert len(parts) == 5


def test_samconfig_lints_builds_in_parallel_and_names_two_environments_with_a_stack_each() -> None:
    config = tomllib.loads((ROOT / "samconfig.toml").read_text())

    assert config["default"]["validate"]["parameters"]["lint"] is True
    assert config["default"]["build"]["parameters"] == {"cached": True, "parallel": True}
    stacks = [config[name]["deploy"]["parameters"]["stack_name"] for name in ("staging", "production")]
    assert len(set(stacks)) == 2
    assert stacks == [config[name]["delete"]["parameters"]["stack_name"] for name in ("staging", "production")]


# The pages.

DEPLOY = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def test_the_page_about_deploying_names_every_parameter_and_every_output_that_it_uses() -> None:
    outputs = {*TEMPLATE["Outputs"], *load("quickstart.yaml")["Outputs"]}
    asked_for = {*re.findall(r"OutputKey==`(\w+)`", DEPLOY), *re.findall(r"\$\(output (\w+)\)", DEPLOY)}

    assert [name for name in PARAMETERS if f"`{name}`" not in DEPLOY] == []
    assert asked_for <= outputs
    assert asked_for


def test_the_command_that_fills_the_secret_makes_what_the_drain_reads(tmp_path: Path) -> None:
    program, words = re.findall(r"^python3 -c '(.*?)' \\\n  (.*?) \|$", DEPLOY, re.MULTILINE | re.DOTALL)[0]
    key = tmp_path / "AuthKey_KEYID12345.p8"
    key.write_text(Credentials.generate().private_key())
    made = subprocess.run(
        [sys.executable, "-c", program, *words.split()],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )

    read = secret.parse("the secret", made.stdout)

    assert isinstance(read, secret.SigningKey)
    assert (read.team_id, read.key_id, read.topic) == ("TEAMID1234", "KEYID12345", "com.example.app")


def test_the_table_of_costs_adds_up() -> None:
    rows = [
        [cell.strip().strip("*") for cell in line.strip("|").split(" | ")]
        for line in DEPLOY.partition("## What it costs")[2].partition("\n\nThe free")[0].splitlines()
        if line.startswith("| ")
    ]
    _, pushes, seconds, *costs, total = (
        [float(cell.replace(",", "")) for cell in row[-3:] if re.fullmatch(r"[0-9.,]+", cell)] for row in rows
    )

    drains = 2 * 730 * 60
    assert [round(sum(column), 2) for column in zip(*costs, strict=True)] == total
    assert pushes == [0.11, 11.4, 1142.0]
    for of_a_drain, cost in zip(seconds, costs[0], strict=True):
        assert abs(drains * of_a_drain * 0.0000133334 - cost) < 0.01
    assert f"{len(ALARMS)} alarms at $0.10" in DEPLOY
    assert f"{len({name for space, name, *_ in shown() if space == 'ApnsOutbox'})} metrics at $0.30" in DEPLOY


def test_every_test_that_the_page_about_threats_names_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)::(test_\w+)`", page)

    lost = [
        f"{module}::{test}"
        for module, test in named
        if f"def {test}(" not in (ROOT / "tests" / f"{module}.py").read_text(encoding="utf-8")
    ]

    assert len(named) > 20
    assert lost == []


# The linters. They live in environments of their own, for the sake of the SAM CLI's pins.

needs_tools = pytest.mark.skipif(
    not ((TOOLS / "sam").exists() and (CHECKOV / "checkov").exists()),
    reason="the SAM CLI, cfn-lint and checkov are not set up: run ./dev template once",
)


def tool(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    home = ROOT / ".venv-aws"
    environ = {
        "PATH": f"{TOOLS}:/usr/bin:/bin",
        "HOME": str(home),
        "SAM_CLI_TELEMETRY": "0",
        "__SAM_CLI_APP_DIR": str(home / "sam"),
    }
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def transformed(template: Path) -> dict[str, Any]:
    ran = tool(TOOLS / "python", ROOT / "devtools" / "transform.py", template)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert isinstance(found, dict)
    return found


@needs_tools
@pytest.mark.parametrize("name", TEMPLATES)
def test_sam_finds_nothing_to_say(name: str) -> None:
    ran = tool(TOOLS / "sam", "validate", "--lint", "-t", name)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "is a valid SAM Template" in ran.stdout


def lint(template: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    plain = tmp_path / "transformed.json"
    plain.write_text(json.dumps(transformed(template)))
    return tool(TOOLS / "cfn-lint", plain)


@needs_tools
@pytest.mark.parametrize("name", TEMPLATES)
def test_cfn_lint_finds_nothing_to_say_of_what_the_template_becomes(name: str, tmp_path: Path) -> None:
    ran = lint(ROOT / name, tmp_path)

    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_tools
@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("Runtime: python3.13", "Runtime: python3.99", "E3030"),
        ("VisibilityTimeout: 150", "VisibilityTimeout: 20", "E3505"),
        ("MaximumConcurrency: 2", "MaximumConcurrency: 1", "E3034"),
        ("rate(1 minute)", "rate(30 seconds)", "E3027"),
    ],
)
def test_the_linter_is_awake(right: str, wrong: str, rule: str, tmp_path: Path) -> None:
    source = (ROOT / "template.yaml").read_text()
    assert source.count(right) == 1
    broken = tmp_path / "broken.yaml"
    broken.write_text(source.replace(right, wrong))

    assert rule in lint(broken, tmp_path).stdout


@needs_tools
@pytest.mark.parametrize("name", TEMPLATES)
def test_checkov_finds_nothing_that_is_not_explained(name: str) -> None:
    ran = tool(CHECKOV / "checkov", "-f", name, "--framework", "cloudformation", "--compact", "--quiet",
               "--skip-download", "-o", "json")  # fmt: skip
    report = json.loads(ran.stdout)

    assert ran.returncode == 0, ran.stdout
    assert report["summary"]["failed"] == 0
    assert report["summary"]["passed"] > 5
    skips = [
        skip
        for found in load(name)["Resources"].values()
        for skip in found.get("Metadata", {}).get("checkov", {}).get("skip", [])
    ]
    assert all(len(skip["comment"]) > 20 for skip in skips)
    # A skip that nothing needs any more is to go.
    assert report["summary"]["skipped"] == len(skips)


@needs_tools
def test_sam_adds_no_policy_to_the_roles_and_keeps_the_rules() -> None:
    becomes = transformed(ROOT / "template.yaml")
    kinds = [found["Type"] for found in becomes["Resources"].values()]

    assert kinds.count("AWS::IAM::Role") == len(FUNCTIONS)
    assert kinds.count("AWS::Lambda::Permission") == 1
    assert kinds.count("AWS::Lambda::EventSourceMapping") == 1
    assert "arn:aws:iam::aws:policy" not in json.dumps(becomes)
    assert becomes["Rules"].keys() == TEMPLATE["Rules"].keys()
