// Nodes on this machine, and the browser that looks at them: shared by dashboard.mjs and picture.mjs.

import { spawn } from "node:child_process";

export const PATIENCE_MS = 30_000;

/** How to launch Chromium, by playwright-core. */
export const CHROMIUM = {
  executablePath: "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync"],
};

/** `paceline up` in a home of its own, with `more` of an environment, when it listens. */
export function up(binary, home, name, more = {}) {
  const child = spawn(binary, ["up", "--name", name, "--port", "0", "--control-port", "0", "--no-beacons"],
    { env: { ...process.env, PACELINE_HOME: home, OPENAI_API_KEY: "", ...more }, stdio: ["ignore", "ignore", "pipe"] });
  let said = "";
  const listening = new Promise((found, lost) => {
    setTimeout(() => lost(new Error(`${name} does not listen: ${said}`)), PATIENCE_MS).unref();
    child.stderr.on("data", (data) => {
      said += data;
      const at = /listening on (\S+)/.exec(said), port = /on port (\d+)/.exec(said);
      if (at && port) found({ child, home, url: at[1], port: port[1] });
    });
  });
  return listening;
}
