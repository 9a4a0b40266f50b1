# Sourced by the test guide's commands: sets $python to an interpreter that has what the environment asks for, made first if need be.
have() { "$1" -c "import paceline, psutil, $2" 2> /dev/null; }

need=rich
[ "${ENGINE:-}" = vllm ] && need=vllm
if [ -n "${VIRTUAL_ENV:-}" ] && have "$VIRTUAL_ENV/bin/python" "$need"; then  # the user's own environment
	python="$VIRTUAL_ENV/bin/python"
else
	make --silent .venv/.ready
	python=.venv/bin/python
	[ "${CLUSTER:-}" != ray ] || make --silent .venv/.ray
	[ "${ACTOR_STRATEGY:-}" != megatron ] || make --silent .venv/.megatron
fi
