// The TypeScript SDK's second generation, in both protocol eras.
// usage: node sdk_v2.mjs TARGET      (see drive.mjs; the era "auto" lets the client find out)

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";

import { drive, headers, target } from "./drive.mjs";

const MODES = { "2025-11-25": "legacy", auto: "auto" };
const mode = MODES[target.era] ?? { pin: target.era };
const client = new Client(
  { name: "outside-sdk-v2", version: "1.0.0" },
  { versionNegotiation: { mode } },
);
const transport = target.url
  ? new StreamableHTTPClientTransport(new URL(target.url), { requestInit: { headers } })
  : new StdioClientTransport(target);

await drive({
  client,
  transport,
  version: () => client.getNegotiatedProtocolVersion(),
  callTool: (params, options) => client.callTool(params, options),
});
