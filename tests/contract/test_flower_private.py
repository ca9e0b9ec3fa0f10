"""What we use of Flower's private modules, against the version that is installed.

It fails first when a new minor version of Flower moves or changes something.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloud_adapters.flower import simulation as flower_simulation

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr import app  # noqa: E402

pytestmark = pytest.mark.flower

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "cloud_adapters/flower/private"


def advice(module: str, what: str) -> str:
    """What whoever tries a new version of Flower has to do."""
    return (
        f"Flower {importlib.metadata.version('flwr')}: {what}. Look for its new place "
        f"or form in Flower's source, adapt {FOLDER}/{module}.py so that the versions "
        "that pyproject.toml allows all work, and run this test with each of them; or "
        "take this version out of the range in pyproject.toml"
    )


def private_names() -> Iterator[tuple[str, str, str]]:
    """Module of ours, module of Flower, name in it; an empty one for all of it."""
    for path in sorted((ROOT / FOLDER).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [(node.module or "", alias.name) for alias in node.names]
            else:
                names = [(str(getattr(node, "value", "")), "")]  # Of import_module.
            for module, name in names:
                if module.startswith("flwr."):
                    yield path.stem, module, name


NAMES = list(private_names())


def find(path: str) -> Any:
    """A member of a private module of ours: ``node.FleetHttpClient.PullMessages``."""
    module, *members = path.split(".")
    found: Any = importlib.import_module(f"cloud_adapters.flower.private.{module}")
    for member in members:
        assert hasattr(found, member), advice(module, f"{path} is gone")
        found = getattr(found, member)
    return found


@pytest.mark.parametrize(("ours", "theirs", "name"), NAMES)
def test_name_is_where_we_import_it_from(ours: str, theirs: str, name: str):
    """By itself: an import error would name the first only."""
    try:
        module = __import__(theirs, fromlist=[name])  # Which may be a module too.
    except ImportError as error:
        pytest.fail(advice(ours, f"{theirs} cannot be imported ({error})"))
    assert not name or hasattr(module, name), advice(
        ours, f"{theirs} has no {name} any more"
    )


def test_a_missing_name_comes_with_advice():
    """Where to look and what to change."""
    with pytest.raises(AssertionError) as caught:
        find("node.FleetHttpClient.NoSuchCall")
    assert "node.FleetHttpClient.NoSuchCall is gone" in str(caught.value)
    assert f"adapt {FOLDER}/node.py" in str(caught.value)


# Arguments as our calls pass them: how many by position, and which by name.
CALLS: list[tuple[str, int, set[str]]] = [
    ("bundle.Fab", 3, set()),
    ("bundle.build_fab_from_files", 1, set()),
    ("bundle.fab_from_proto", 1, set()),
    ("bundle.fab_to_proto", 1, set()),
    (
        "control.ControlHttpClient.from_server_address",
        1,
        {"insecure", "root_certificates", "interceptors"},
    ),
    ("control.user_config_to_proto", 1, set()),
    ("http.extensions.get_middleware", 0, set()),
    ("messages.get_all_nested_objects", 1, set()),
    ("messages.get_object_tree", 1, set()),
    ("messages.inflate_object_from_contents", 2, set()),
    ("messages.iterate_object_tree", 1, set()),
    ("messages.make_confirm_message_received_fn_protobuf", 3, set()),
    ("messages.make_message", 0, {"metadata", "content"}),
    ("messages.make_message", 0, {"metadata", "error"}),
    ("messages.make_pull_object_fn_protobuf", 3, set()),
    ("messages.make_push_object_fn_protobuf", 4, set()),
    ("messages.message_from_proto", 1, set()),
    ("messages.message_to_proto", 1, set()),
    ("messages.no_object_id_recompute", 0, set()),
    ("messages.ObjectPullError", 2, set()),
    (
        "messages.pull_objects",
        1,
        {"pull_object_fn", "initial_backoff", "backoff_cap"},
    ),
    ("messages.push_objects", 1, {"push_object_fn", "object_ids_to_push"}),
    ("messages.remove_content_from_message", 1, set()),
    ("node.FleetHttpClient", 1, {"interceptors", "verify", "timeout"}),
    ("node.FlowerError.from_json", 1, set()),
    ("node.NodeAuthHttpInterceptor", 2, set()),
    ("node.RuntimeVersionMetadata.from_local_component", 1, set()),
    ("node.add_headers", 2, set()),
    ("node.public_key_to_bytes", 1, set()),
    ("runtime.RuntimeHttpClient", 0, {"interceptors"}),
    ("runtime.mirror_output_to_queue", 1, set()),
    ("runtime.restore_output", 0, set()),
    ("runtime.LaunchResult.accepted", 0, set()),
    ("runtime.LaunchResult.failed", 1, set()),
    ("superlink.flower_superlink", 0, set()),
    ("superlink.now", 0, set()),
    ("superlink.uint64_to_int64", 1, set()),
]


@pytest.mark.parametrize(("path", "positions", "names"), CALLS)
def test_functions_take_what_we_pass(path: str, positions: int, names: set[str]):
    """Nothing that we do not pass may be required."""
    function = find(path)
    check_call(path, function, positions, names)


def check_call(path: str, function: Any, positions: int, names: set[str]) -> None:
    signature = inspect.signature(function)
    try:
        if names and any(
            part.kind is part.VAR_KEYWORD for part in signature.parameters.values()
        ):
            names = names & set(signature.parameters)
        bind = signature.bind_partial if path.endswith("HttpClient") else signature.bind
        bind(*[None] * positions, **dict.fromkeys(names))
    except TypeError as error:
        pytest.fail(
            advice(path.partition(".")[0], f"{path}{signature} differs: {error}")
        )


@pytest.mark.parametrize(
    ("get", "function", "names"),
    [
        (
            "runtime.superexec_module",
            "run_superexec",
            {
                "runtime_api_address",
                "insecure",
                "root_certificates_path",
                "superexec_auth_secret",
                "runtime_dependency_install",
            },
        ),
        (
            "runtime.serverapp_module",
            "run_serverapp",
            {
                "runtime_api_address",
                "log_queue",
                "token",
                "insecure",
                "certificates",
                "parent_pid",
                "runtime_dependency_install",
            },
        ),
    ],
)
def test_processes_start_with_what_we_pass(get: str, function: str, names: set[str]):
    check_call(get, getattr(find(get)(), function), 0, names)


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        (
            "node.FleetHttpClient",
            "ActivateNode DeactivateNode SendNodeHeartbeat ConfirmMessageReceived",
        ),
        (
            "node.FleetHttpClient",
            "PullMessages PushMessages PullObject PushObject",
        ),
        (
            "runtime.RuntimeHttpClient",
            "PushMessages PullMessages PushObject PullObject ConfirmMessageReceived",
        ),
        (
            "control.ControlHttpClient",
            "StartRun ListRuns StopRun RegisterNode UnregisterNode ListNodes close",
        ),
        ("superlink.SqlLinkState", "session object_store"),
        ("runtime.TaskType", "SERVER_APP"),
        ("runtime.HttpGrid", "_runtime_client run get_nodes get_node_ids"),
    ],
)
def test_classes_have_what_we_call(path: str, calls: str):
    for call in calls.split():
        find(f"{path}.{call}")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("messages.Message", "metadata content error"),
        ("messages.ObjectTree", "object_id children"),
        ("messages.Node", "node_id"),
        ("messages.NodeInfo", "node_id online_until heartbeat_interval"),
        ("node.ActivateNodeRequest", "public_key heartbeat_interval"),
        ("node.DeactivateNodeRequest", "node_id"),
        ("node.SendNodeHeartbeatRequest", "node heartbeat_interval"),
        ("node.PullMessagesRequest", "node"),
        (
            "node.PushMessagesRequest",
            "node messages_list message_object_trees clientapp_runtime_list",
        ),
        ("runtime.ConfirmMessageReceivedRequest", "node run_id message_object_id"),
        ("runtime.PullObjectRequest", "node run_id object_id"),
        ("runtime.PushAppMessagesRequest", "messages_list message_object_trees"),
        ("control.StartRunRequest", "fab override_config"),
        ("control.StopRunRequest", "run_id"),
        ("control.RegisterNodeRequest", "public_key"),
        ("control.UnregisterNodeRequest", "node_id"),
        ("control.RunStatus", "status sub_status details"),
        ("bundle.GetFabRequest", "hash_str"),
        ("bundle.GetFabResponse", "fab"),
        ("superlink.PushMessagesResponse", "session_id objects_to_push"),
        ("superlink.PushObjectRequest", "node run_id session_id object_content"),
        ("superlink.PushObjectResponse", "stored"),
    ],
)
def test_messages_have_our_fields(path: str, fields: str):
    """Flower's wire has no others for what we read and write."""
    found = set(find(path).DESCRIPTOR.fields_by_name)
    missing = set(fields.split()) - found
    assert not missing, advice(
        path.partition(".")[0], f"{path} has no {sorted(missing)}"
    )


def test_members_behind_an_underscore():
    """Those that we replace or set, since there is no other way in."""
    client = find("node.FleetHttpClient")("http://127.0.0.1:1", interceptors=[])
    assert isinstance(client._client, httpx.Client), advice(
        "node", "FleetHttpClient keeps its connections elsewhere than in _client"
    )
    client.close()
    find("messages.TaskIdentity").run_id = 1
    find("messages.TaskIdentity").node_id = 2
    find("messages.TaskIdentity").task_id = 3
    message = app.Message(app.RecordDict(), 4, "query")
    message.metadata.__dict__["_message_id"] = "name"
    assert message.metadata.message_id == "name", advice(
        "messages", "the id of a message is kept elsewhere than in _message_id"
    )
    assert looks_up(find("runtime.HttpGrid").__init__, "node"), advice(
        "runtime", "HttpGrid does not set its node"
    )


def test_codes_of_errors_mean_what_we_take_them_for():
    """They are numbers on the wire: another meaning would raise nothing."""
    from cloud_adapters.flower import errors  # noqa: PLC0415

    code = find("messages.ErrorCode")
    ours = {
        code.LOAD_CLIENT_APP_EXCEPTION,
        code.CLIENT_APP_RAISED_EXCEPTION,
        code.MOD_FAILED_PRECONDITION,
        code.INVALID_FAB,
        code.CLIENT_APP_CRASHED,
    }
    lost = {code.MESSAGE_UNAVAILABLE, code.REPLY_MESSAGE_UNAVAILABLE}
    numbers = {
        value
        for name, value in vars(code).items()
        if name.isupper() and isinstance(value, int)
    }
    assert ours == errors.CRASHES
    assert lost == errors.LOST
    assert code.NODE_UNAVAILABLE == errors.NODE_GONE
    assert numbers == ours | lost | {errors.NODE_GONE, code.UNKNOWN}, advice(
        "messages", "it has codes of errors that cloud_adapters/flower/errors.py lacks"
    )
    assert find("node.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED") == 2004
    assert find("superlink.SUPERLINK_NODE_ID") == 1


def looks_up(function: Any, name: str) -> bool:
    """Whether a function looks a global name up when it is called."""
    return name in inspect.unwrap(function).__code__.co_names


@pytest.mark.parametrize("name", ["get_executor", "RuntimeHttpClient"])
def test_superexec_uses_what_we_put_in_its_module(name: str):
    module = find("runtime.superexec_module")()
    assert looks_up(module.run_superexec, name), advice(
        "superexec", f"run_superexec does not look up {name}"
    )


@pytest.mark.parametrize("name", ["fab_from_proto", "register_signal_handlers"])
def test_serverapp_uses_what_we_put_in_its_module(name: str):
    """Or another bundle than ours would be loaded without a word."""
    module = find("runtime.serverapp_module")()
    assert looks_up(module.run_serverapp, name), advice(
        "runtime", f"run_serverapp does not look up {name}"
    )


def test_connection_of_a_serverapp_is_made_in_the_module_of_its_grid():
    """So that our client, which adds the secret, takes the place of Flower's."""
    source = inspect.getsource(find("runtime.HttpGrid"))
    assert "RuntimeHttpClient.from_server_address(" in source, advice(
        "runtime", "HttpGrid makes its client elsewhere"
    )


def test_superlink_puts_middleware_of_extensions_before_its_own():
    """The guard stands there."""
    from flwr.superlink import main  # noqa: PLC0415

    source = inspect.getsource(main._get_middleware)
    first = source.partition("return [")[2].strip().partition(",")[0]
    assert first == "*extensions.get_middleware()", advice(
        "http", "the SuperLink's outermost middleware is not that of its extensions"
    )


@pytest.mark.parametrize("name", ["push_messages", "push_object"])
def test_routes_look_up_the_handlers_that_the_gate_replaces(name: str):
    from flwr.superlink.routers.fleet import router  # noqa: PLC0415

    source = inspect.getsource(router)
    call = f"fleet_handlers.{name}(request=request, state=state)"
    assert call in source, advice("superlink", f"the route calls no {call}")
    parameters = list(
        inspect.signature(find(f"superlink.fleet_handlers.{name}")).parameters
    )
    assert parameters == ["request", "state"]


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("message_ins", "message_id dst_node_id created_at ttl content"),
        ("message_res", "message_id content"),
        ("objects", "object_id"),
    ],
)
def test_tables_have_what_the_gate_reads_and_writes(table: str, columns: str):
    from flwr.supercore.object_store import sql_object_store  # noqa: PLC0415

    tables = {
        **find("superlink.SqlLinkState").get_metadata(None).tables,
        **sql_object_store.SqlObjectStore.get_metadata(None).tables,
    }
    assert table in tables, advice("superlink", f"the table {table} is gone")
    missing = set(columns.split()) - set(tables[table].columns.keys())
    assert not missing, advice(
        "superlink", f"the table {table} has no {sorted(missing)}"
    )


def test_answers_are_asked_for_by_the_messages_that_they_answer():
    """A list without a name would be no filter: every answer of the run."""
    request = find("runtime.pull_request")(["a", "b"])
    ((_, found),) = request.ListFields()
    assert list(getattr(found, "vals", found)) == ["a", "b"]
