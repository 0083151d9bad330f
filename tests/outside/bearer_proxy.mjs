// Adds the bearer token to every request on its way to the daemon's HTTP door, because the conformance suite
// has no option for a header. Nothing else is touched: a foreign Host or Origin arrives as it was sent.
//
// usage: node bearer_proxy.mjs URL     (token in EVALPURSE_TOKEN; prints its own URL; ends with its stdin)

import http from "node:http";

const door = new URL(process.argv[2]);
const authorization = `Bearer ${process.env.EVALPURSE_TOKEN}`;

const proxy = http.createServer((request, response) => {
  const own = `${proxy.address().port}`;
  const headers = { ...request.headers, authorization };
  for (const name of ["host", "origin"]) {
    headers[name] = headers[name]?.replace(new RegExp(`:${own}$`), `:${door.port}`);
    if (headers[name] === undefined) delete headers[name];
  }
  const { hostname: host, port } = door;
  const onward = http.request({ host, port, method: request.method, path: request.url, headers }, (answer) => {
    response.writeHead(answer.statusCode, answer.headers);
    answer.pipe(response);
  });
  onward.on("error", () => response.destroy());
  response.on("close", () => onward.destroy()); // a client that hangs up cancels its call
  request.pipe(onward);
});

proxy.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${proxy.address().port}${door.pathname}`));
process.stdin.on("end", () => process.exit(0)).resume();
