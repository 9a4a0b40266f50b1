# Sourced by run_e2e_test.sh and run_benchmark.sh: sets $python to an interpreter that has every
# package the environment variables require. If PYTHON is set, it is used and nothing is installed.
# Otherwise: the active environment, .venv or .venv-vllm if complete; else one of the two is created.
need="torch transformers pydantic typer rich psutil"
case "${ENGINE:-}" in vllm) need="$need vllm" ;; esac

missing() {
	"$1" - $need <<-'PY'
	import sys
	from importlib.util import find_spec

	print(*[name for name in sys.argv[1:] if not find_spec(name)])
	PY
}
has_all() { [ -x "$1" ] && [ -z "$(missing "$1")" ]; }
fail() {
	echo "error: PYTHON=$python $1"
	exit 2
}

python="${PYTHON:-}"
if [ -n "$python" ]; then
	lacks=$(missing "$python") || fail "does not run; set it to a Python interpreter, or unset it"
	[ -z "$lacks" ] || fail "has no $lacks; install the missing packages, or unset PYTHON"
	return
fi
for known in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" .venv/bin/python .venv-vllm/bin/python; do
	if [ -z "$python" ] && [ -n "$known" ] && has_all "$known"; then python="$known"; fi
done
if [ -z "$python" ] && [ "${ENGINE:-}" = vllm ]; then
	make --silent .venv-vllm/.ready
	python=.venv-vllm/bin/python
elif [ -z "$python" ] || [ "$python" = .venv/bin/python ]; then
	make --silent .venv/.ready
	python=.venv/bin/python
	[ "${CLUSTER:-}" != ray ] || make --silent .venv/.ray
	[ "${ACTOR_STRATEGY:-}" != megatron ] || make --silent .venv/.megatron
fi
