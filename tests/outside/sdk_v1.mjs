// The TypeScript SDK's first generation, which most hosts embed. It speaks the handshake era only.
// usage: node sdk_v1.mjs TARGET      (see drive.mjs)

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

import { drive, headers, target } from "./drive.mjs";

const client = new Client({ name: "outside-sdk-v1", version: "1.0.0" });
const transport = target.url
  ? new StreamableHTTPClientTransport(new URL(target.url), { requestInit: { headers } })
  : new StdioClientTransport(target);

let version; // this client tells it to its transport only
const { setProtocolVersion } = transport;
transport.setProtocolVersion = (agreed) => {
  version = agreed;
  setProtocolVersion?.call(transport, agreed);
};

await drive({
  client,
  transport,
  version: () => version,
  callTool: (params, options) => client.callTool(params, undefined, options),
});
