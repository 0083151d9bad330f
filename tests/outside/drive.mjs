// Lets a test drive an MCP client line by line: one JSON command in, one JSON answer out, in order.
//
// Commands: {"list": true}
//           {"call": NAME, "arguments": {...}, "cancel": true to cancel it at its first progress}
// Answers:  {"tools": [...]} | {"result": {...}, "progress": [...]} | {"failure": TEXT, "progress": [...]}
// The first line out says what was agreed on: {"server": {...}, "version": "...", "instructions": "..."}
// The client is closed when stdin ends.

import readline from "node:readline";

const CALL_TIMEOUT_MS = 50_000;

const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");

/** `callTool(params, options)` is the one thing that both generations of the SDK spell differently. */
export async function drive({ client, transport, version, callTool }) {
  await client.connect(transport);
  say({
    server: client.getServerVersion(),
    version: version(),
    instructions: client.getInstructions(),
  });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    say(await obey(client, callTool, JSON.parse(line)));
  }
  await client.close();
}

async function obey(client, callTool, command) {
  const progress = [];
  try {
    if (command.list) return { tools: (await client.listTools()).tools };
    const abort = new AbortController();
    const onprogress = (told) => {
      progress.push([told.progress, told.total ?? null, told.message ?? null]);
      if (command.cancel) abort.abort("the test cancels it");
    };
    const params = { name: command.call, arguments: command.arguments };
    const options = { onprogress, signal: abort.signal, timeout: CALL_TIMEOUT_MS };
    return { result: await callTool(params, options), progress };
  } catch (error) {
    return { failure: `${error.name} ${error.code ?? ""}: ${error.message ?? error}`, progress };
  }
}

/** Where the server is: {"command", "args", "env"} or {"url", "token"}; `era` is a protocol version. */
export const target = JSON.parse(process.argv[2]);
export const headers = { Authorization: `Bearer ${target.token}` };
