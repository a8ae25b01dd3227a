"""Removes identifying details from a text or JSON value: tokens, paths, host names, addresses.

Text that is the same on every machine stays, so that a log remains readable. Secrets are replaced before places. Every
repetition that is tried at each position is bounded, possessive, or begins at the start of a word, because a log may
have a megabyte without a space.
"""

import getpass
import ipaddress
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from sparkforge.core.console import USER_INFO
from sparkforge.core.paths import ROOT

TOKEN = "<token>"  # noqa: S105 - what stands in a token's place
Replacement = str | Callable[[re.Match[str]], str]

# Loopback, and public hosts that occur in every log; they do not identify the owner.
PUBLIC = (
    r"(?:127\.0\.0\.1|localhost|\[::1\]|github\.com|raw\.githubusercontent\.com|ghcr\.io|huggingface\.co|nvcr\.io"
    r"|(?:docs\.)?vllm\.ai|(?:docs\.)?docker\.(?:com|io)|(?:(?:docs|developer)\.)?nvidia\.com|(?:download\.)?pytorch\.org"
    r"|python\.org|nanobind\.readthedocs\.io|ubuntu\.com|openaipublic\.blob\.core\.windows\.net|openai\.com|example\.com)"
)
# Endings of names whose value is a secret. No letter may precede an ending that can also end a harmless word, such
# as compass.
KEYWORD = (
    r"(?:token|secret|passw(?:or)?d|passwd|passphrase|passcode|credentials?|signature|cookie|authorization"
    r"|(?:api|access|account|auth|client|encryption|master|private|secret|session|signing|ssh)[_.-]?keys?"
    r"|(?<![a-z])(?:pass|pwd|pw|bearer|auth|authn|csrf|jwt|otp|pin[_-]?code|psk|sas|sig|x-amz-credential)"
    r"|(?<=[_-])(?:pw|keys?)|(?<=_)(?:auth|pass|pat|pwd|sig)|sessid|session[_-]?id)"
    r"(?:[_-](?:base|value|b64|base64|hex|prod|test|old|new|live|id|string|\d{1,3})|\d{1,2})?"
)
SECRET_NAME = re.compile(rf"-*[\w.-]{{0,128}}?{KEYWORD}", re.IGNORECASE)
# Names with such an ending whose value is not a secret.
HARMLESS_NAME = re.compile(
    r"(?i)(?:.*[_.-])?(?:public|cache|dict|group|hash|index|sort|primary|foreign|lookup|request|query|mapping|state|json"
    r"|attn|q|k|map|row|store)[_-]?keys?"
    r"|.*(?:bos|eos|pad|unk|sep|cls|mask|image|stop|special|first|last|next|per|one|each|prompt|output|max|num|new|bonus"
    r"|draft|sampled|start|end|placeholder)[_ -]?token(?:[_-]id)?"
)
# Placeholders that stand for a secret.
NO_SECRET = re.compile(
    r"(?i)(?:none|null|nil|true|false|yes|no|on|off|unset|not|required|invalid|missing|disabled|enabled|default|auto"
    r"|<[^<>]{1,40}>?|\*+|\.{2,}|\$\{?\w+\}?|\d{1,4}(?:\.\d+)?(?:ms|s|%)?|/[\w./-]*)?,?"
)
QUOTE = r"(?:\\{0,8}[\"'`])"
# Separators between a name and its value: `: `, `=`, ` => `, `%3D`; in a tuple or a list `, `; in JSON and YAML
# `"name": "KEY", "value": `.
BETWEEN = (
    rf"(?>{QUOTE}?[ \t]{{0,8}}(?:=>|:=|==?|:|%3D)[ \t]{{0,8}}"
    rf"|{QUOTE}[ \t]{{0,4}},\s{{0,8}}(?=b?\\{{0,8}}[\"'](?!val))"
    rf"|{QUOTE}?\s{{0,40}}[,;]?\s{{0,40}}{QUOTE}?val(?:ue)?{QUOTE}?\s{{0,4}}[:=]\s{{0,4}})"
)
# A value: a list, a text in quotes, or a word. A word ends at a space or quote, and at a
# separator or closing bracket only if the next pair or nothing follows.
VALUE = (
    r"(?:(?P<list>[\[({](?=\s{0,40}[^\s\])}])[^\])}]{1,2000}|(?:\n[ \t]{0,40}- [^\n]{1,512})++)"
    rf"|(?P<open>b?(?P<quote>{QUOTE}))(?P<quoted>(?:(?!(?P=quote))\\?[^\n]){{0,4096}}+)"
    r"|(?P<bare>(?!<token>)(?:[^\s\"'`,;&)\]}\\]|\\(?![nrt\"'])"
    r"|[,;&)\]}](?![\w.-]{0,64}[=:]|[\s\"'`,;&)\]}]|$))++))"
)
# Plugins of detect-secrets for tokens without a prefix of their own. The patterns of the other plugins scan without
# bound, or match ordinary words.
DETECTORS = ("Discord", "GitLab", "Mailchimp", "Slack", "Telegram", "Twilio")
# Tokens with a prefix, also in a log that was cut off, where detect-secrets does not match them.
OWN_TOKENS = (
    r"\b(?:hf_(?=[a-z]*[0-9A-Z])[A-Za-z0-9]{6,}|hf_[a-z]{20,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|(?:(?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA)[A-Z0-9]|(?:sk|pk|rk)[-_](?:live|test|proj|ant)[-_]|sk-|gh[pousr]_|github_pat_"
    r"|nvapi-|xox[abceoprs]-|xapp-|gl(?:pat|dt|ft|soat|rt|cbt|ptt|agent|oas|imt)-|dckr_(?:pat|oat)_)[\w-]{6,}"
    r"|(?:api_org_|whsec_|tvly-|lsv2_|wandb_v1_|ya29\.|GOCSPX-|pypi-Ag|shp(?:at|ca|pa|ss)_|do[opr]_v1_|hv[sbr]\.|lin_api_"
    r"|ATATT3|figd_|sq0(?:csp|atp)-|glsa_|PMAK-|tskey-|sntrys_|AGE-SECRET-KEY-|ops_eyJ|SG\.[\w-]{10,}\.|xai-|gsk_|r8_"
    r"|pplx-|npm_|ntn_|rubygems_|AIza|EAAA|dapi)[\w+/=-]{16,})"
)
# Top-level domains of a host name without a scheme. Those that are also the end of a file or module name (py, rs, sh,
# io, app, dev) count only after a label with a digit or hyphen.
DOMAINS = (
    r"(?:com|net|org|edu|gov|mil|cloud|biz|tech|online|site|xyz|arpa|lan|corp|intranet|localdomain|onion"
    r"|de|at|ch|uk|fr|nl|eu|us|jp|cn|ru|se|dk|fi|pt|gr|cz|hu|ro|ie|br|mx|au|nz|kr|tw|za|il|tr|ua|ca|in|sg|hk)"
)
UNSURE_DOMAINS = r"(?:io|ai|dev|app|info|it|es|co|me|be|no|is|to|pl|local|internal|home|private|test)"
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
MODULES = {"threading.local", "torch.it", "np.info", "logger.info", "logging.info", "log.info", "asyncio.to"}
# Folders whose contents are the same for everybody, in our container and on a plain Linux.
COMMON = (
    *("/usr/", "/opt/venv/", "/lib/", "/lib64/", "/etc/", "/proc/", "/sys/", "/dev/", "/run/", "/bin/", "/models/"),
    *("/var/cache/sparkforge/", "/var/run/docker.sock/", "/v1/"),
)
PERSONAL = ("/run/media/", "/run/user/", "/dev/shm/", "/usr/home/")  # noqa: S108 - not opened, only looked for
NAME_KEYS, VALUE_KEYS = {"name", "key", "variable", "header"}, {"value", "val", "default"}


def for_support(value: Any) -> Any:
    """Return a copy of a JSON value or a text without secrets, names and homes; paths that all machines share stay."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], str(ROOT), str(Path.home())}
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    # Whole names only, not parts of hyphenated ones: on a machine called gpt, gpt-oss stays.
    telling = sorted(names - {"", "/", "root", "localhost"}, key=len, reverse=True)
    own = re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in telling) or r"(?!)")

    def redacted(text: str) -> str:
        for pattern, replacement in _rules():
            text = pattern.sub(replacement, text)
        return own.sub("<host>", text)

    def walk(value: Any, name: str) -> Any:
        """Return a redacted copy of a value. `name` identifies it: its key, its flag, or the text of a NAME_KEY."""
        secret = _is_secret_name(name)
        if isinstance(value, dict):
            label = next((text for key, text in value.items() if key.lower() in NAME_KEYS and type(text) is str), name)
            names = {key: label if key.lower() in VALUE_KEYS else name if secret else key for key in map(str, value)}
            return {redacted(str(key)): walk(item, names[str(key)]) for key, item in value.items()}
        if isinstance(value, list):
            items: list[Any] = []
            for item in value:  # ["--api-key", "…"], ["authorization", "…"]
                is_flag = isinstance(item, str) and item.startswith("-")
                # A secret's value follows its name, whatever it looks like.
                is_word = isinstance(item, str) and not _is_secret_name(name) and _is_secret_name(item)
                is_name = not secret and (is_flag or is_word)
                items.append(walk(item, "" if is_name else name))
                name = item if is_name else name
            return items
        if secret and isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
            return TOKEN
        if not isinstance(value, str) or (
            name.endswith("version") and re.fullmatch(r"\d+(?:\.\d+){1,4}[\w.+-]*", value)
        ):
            return value  # 9.20.0.48 is cuDNN's version, not an address
        return redacted(value)

    return walk(value, "")


def _is_secret_name(name: str) -> bool:
    return SECRET_NAME.fullmatch(name) is not None and HARMLESS_NAME.fullmatch(name) is None


def _named_value(match: re.Match[str]) -> str:
    """Replace the value after a secret's name; keep words that are not secrets, such as None."""
    if HARMLESS_NAME.fullmatch(match["name"]):
        return match[0]
    prefix = match[0][: match.start("value") - match.start()]
    if match["list"]:
        return f"{prefix}{match['list'][0].strip()}{TOKEN}"
    text = match["bare"] if match["quoted"] is None else match["quoted"]
    return match[0] if NO_SECRET.fullmatch(text) else f"{prefix}{match['open'] or ''}{TOKEN}"


def _host_name(match: re.Match[str]) -> str:
    rest, _, top = match["host"].rpartition(".")
    sure = top.lower() in {"local", "internal"} or re.search(r"[\d-]", rest)
    unsure = re.fullmatch(UNSURE_DOMAINS, top.lower()) and match["host"] not in MODULES and not rest[0].isdigit()
    return "<host>" if re.fullmatch(DOMAINS, top.lower()) or (unsure and sure) else match[0]


def _path(match: re.Match[str]) -> str:
    """Keep a path in a checkout or a Python package, or common to all machines; shorten others to the last part."""
    path = match[0]
    is_top = path.count("/") == 1 and path[0] == "/"  # a route of the API, or a top folder
    if is_top or (f"{path.rstrip('/')}/".startswith(COMMON) and not path.startswith(PERSONAL)):
        return path
    if path.startswith(f"{ROOT}/") and len(ROOT.parts) > 1:
        return f"<checkout>/{path.removeprefix(f'{ROOT}/')}"
    if inside := re.fullmatch(r".*?/((?:site|dist)-packages/.*)", path):
        return f"<path>/{inside[1]}"
    parts = [part for part in path.split("/") if part]
    return f"<path>/{parts[-1]}" if len(parts) > 2 else "<path>"  # the last part names a model


def _address(match: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(match[0].partition("%")[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "<address>"


@cache
def _rules() -> list[tuple[re.Pattern[str], Replacement]]:
    """Return the rules: secrets, then machines, hosts, people and paths. detect-secrets takes 0.1 s to import."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class  # noqa: PLC0415

    detectors: list[Any] = list(get_mapping_from_secret_type_to_class().values())
    chosen = (plugin for plugin in detectors if plugin.__name__.startswith(DETECTORS))
    rules: tuple[tuple[str | re.Pattern[str], Replacement], ...] = (
        (r"(?s)-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z -]*|\Z)", TOKEN),
        (USER_INFO, f"{TOKEN}@"),
        *((pattern, TOKEN) for plugin in chosen for pattern in plugin.denylist),
        (OWN_TOKENS, TOKEN),
        # Headers: their value continues after a space.
        ((rf"(?i)(authorization{QUOTE}?\s{{0,4}}(?>=>|%3D|[:=,])\s{{0,4}}+(?:b?{QUOTE})?+"
         r"(?:(?:bearer|basic|token|negotiate|api-?key|ntlm|oauth)\s+)?+)"
         r"(?!<token>)(?:(?:digest|aws4-hmac-sha256)\s[^\n]+|[^\s\"'\\]+(?:[ \t]+(?!-)[^\s\"'\\]+)?)"), rf"\1{TOKEN}"),
        ((rf"(?i)((?:cookies?{BETWEEN}|\s-b[ =]\s{{0,4}}|--cookie[ =]\s{{0,4}})(?:b?{QUOTE})?)(?=[\w-]{{1,64}}=)"
          r"[^\"'\n\\]+"), rf"\1{TOKEN}"),
        (r"(?i)\b(bearer|basic)\s+(?!auth|authentication\b|access\b|<)[\w.~+/=-]{6,}", rf"\1 {TOKEN}"),
        # Logins on a command line: curl -u user:password, docker login -p.
        ((r"(?<!\S)((?:-[a-zA-Z]{0,6}u|-U|--(?:proxy-)?user)[ =]?\s{0,4}(?P<q>[\"'])?"
         r"(?(q)[^:\"'\n]{0,128}|[^\s:\"'=/]{0,128}):)(?!\d+(?:[\s\"']|$)|//)(?(q)[^\"'\n]+|[^\s\"']+)"),
         rf"\1{TOKEN}"),
        (r"(?i)\b((?:docker|podman|helm|oras)\s[^\n|;&]{0,80}?login\b[^\n|;&]{0,99}?\s-p\s?)(?!<)\S+", rf"\1{TOKEN}"),
        ((rf"(?i)(?<![\w.-])(?!(?<=<)token>)(?P<name>[\w.-]{{0,128}}?(?!authorization{QUOTE}?\s{{0,8}}[:=,%]){KEYWORD})"
          rf"{BETWEEN}(?P<value>{VALUE})"), _named_value),
        ((r"(?<![\w-])(--?([A-Za-z][\w-]*+))(\s+(?:\\\n\s*)?[\"']?|[\"'],\s{0,8}[\"'])(?!-|id=)((?<=[\"'])[^\"'\n]+"
         r"|[^\s,;&\"']+(?:[ \t]+(?!-)(?=[^\s\"']{0,80}\d)[^\s,;&\"'/]+(?=\s|$))*)"),
         lambda match: f"{match[1]}{match[3]}{TOKEN}" if _is_secret_name(match[2]) else match[0]),
        (r"(?<![\w.+-])[\w.+-]++@[\w-]{1,63}(?:\.[\w-]{1,63})+", "<address>"),
        ((r"(?im)(?:(?<=\bssh )|(?<=\bscp )|(?<=\brsync )|(?<=\bsftp )|(?<=\[)|^)"
         r"[a-z_][\w.-]{0,31}@(?!sha\d|latest|main\b)[a-z][\w-]{0,62}\b"), "<address>"),
        # Lines of a private key whose first line was cut off; a sha256 has no capitals.
        (r"(?m)^(?=[^A-Z\n]{0,80}[A-Z])[A-Za-z0-9+/=]{60,80}$", TOKEN),
        (rf"(?i)(?<![a-z0-9+.-])(?!file:)([a-z][a-z0-9+.-]{{1,30}})://(?!{PUBLIC}(?:[:/?#\s\"'>)\]]|$))[^\s/\"'?#]+",
         r"\1://<host>"),
        # Hardware addresses with separated bytes or words, and GUIDs of InfiniBand.
        (r"(?i)(?<![\w:-])(?:[0-9a-f]{2}[:-]){5,19}[0-9a-f]{2}(?![\w:-])", "<address>"),
        (r"(?i)(?<![\w.:-])[0-9a-f]{4}([.:-])[0-9a-f]{4}\1[0-9a-f]{4}(?![\w.:-]\w|\w)", "<address>"),
        (r"(?i)(?<![\w.:-])(?:0x)?(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![\w:])", "<address>"),
        ((r"(?i)(?<![\w.])(?<!::)(?![0-9a-f:]{40})(?=[0-9a-f]{0,4}:[0-9a-f]{0,4}:)[0-9a-f:]{2,39}(?:(?:\d{1,3}\.){3}\d{1,3})?"
         r"(?:%\w+)?(?![\w:]|\.\d)"), _address),
        # Four numbers are a version after a comparison, the word version, or cuDNN's name: 9.20.0.48.
        ((r"(?i)(?<![\w.])(?<![=<>~!]=)(?<!cudnn )(?<!cu\d\d-)(?<!ersion )(?<!ersion=)(?<!ersion: )(?<!ersion = \")"
         r"(?<!ersion\": \")(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d)"), _address),
        (r"(?i)\b(?:MIG-)?(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4,12}){4}(?:/\d{1,3}){0,2}", "<gpu>"),
        ((r"(?i)\b((?:(?:machine|boot|product|gpu|system)[_-]?u?uid|machine[_-]id|serial(?:[_ -]?(?:number|no))?"
         r"|hostname|nodename|fqdn|computer_?name)[\"']?\s{0,8}[=:]\s{0,8}[\"']?)(?!n/a|none|null|<)[\w.-]{1,128}"),
         r"\1<id>"),
        (r"(?m)^((?:\([^)\n]*\) *)*)[\w.-]+(?=:\d+:\d+ \[\d+\] )", r"\1<host>"),  # NCCL: HOST:PID:TID [GPU]
        (r"\b((?:SUDO_USER|USER|LOGNAME|USERNAME)=|[ug]id=\d{1,10}\()(?!root\b|<)[\w.@-]{1,64}", r"\1<user>"),
        ((rf"(?<![\w.@/~%+-])(?!(?:www\.)?{PUBLIC}(?![\w-]))(?!{LABEL}\.(?:in|co|test|name|host|app)(?![\w.-]))"
         rf"(?=(?P<host>(?:{LABEL}\.){{1,8}}[A-Za-z]{{2,12}}(?![\w-])(?!\.\w)))(?P=host)(?!\()"), _host_name),
        # Homes on Windows, ~anna, and on other disks.
        ((r"(?i)\b[a-z]:(?:\\{1,4}|/)Users(?:\\{1,4}|/)[^\\/\s\"']{1,64}|(?<![\w./~-])~[a-z_][\w.-]{0,31}(?=/)"
         r"|/(?:mnt|media|data|srv|scratch|export|nfs|net|var)/"
         r"(?:[\w.+-]{1,64}/){0,4}?(?:home|users|people|user)/[\w.+@~-]{1,128}/?(?![\w/])"), "<path>"),
        # A home anywhere (-I/home/anna/include); another path only where a path can begin.
        ((r"/(?:home|Users|root|media|mnt)(?:/[\w.+@~%-]+)+/?"
         r"|(?:(?<![\w./>])|(?<=file://))~?/(?:[\w.+@~%-]+/)*[\w.+@~%-]+/?"), _path),
    )  # fmt: skip
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]
